"""The bounds of one server connection."""

from __future__ import annotations

from dataclasses import dataclass

# A request's body waits here until its application reads it; then reading from the socket pauses.
BODY_BYTES = 64 << 10
# Reading also pauses while more requests than this wait for the answers before theirs.
PIPELINED = 8
# The most bytes of an answer that wait in the server before its application does, and in the kernel. The
# kernel would keep megabytes of each answer for a client on the same network.
ANSWER_BYTES = 16 << 10
KERNEL_BYTES = 64 << 10


@dataclass(frozen=True)
class Limits:
    """`head_bytes` also bounds data after a body. `head_s` runs from a head's first byte to its last, and
    from a connection's start to its first head. `idle_s` runs from an answer to the next request.

    `unread_s` is the time in which a client must read something of a waiting answer. The default is that of
    `controlplane.api.request_limits`, which this package must not import.
    """

    head_bytes: int = 64 << 10
    head_s: float = 8.0
    idle_s: float = 5.0
    unread_s: float = 17.0
