"""The calls that a gateway makes for each request. There is one call per event, because a call of compiled
code from Python costs more than its work. Compiled.
"""

from __future__ import annotations

from controlplane.routing import bookkeeping, least_harm
from controlplane.routing.placements import demand
from controlplane.routing.snapshot import Snapshot
from controlplane.routing.state import RouterState
from profiler.compiled import Records, compiled

_pick, _sent, _filled, _ended, _count = (
    least_harm.pick,
    bookkeeping.sent,
    bookkeeping.filled,
    bookkeeping.ended,
    demand.count,
)


@compiled
def dispatch(snapshot: Snapshot, request: Records, state: RouterState, is_new: bool) -> int:
    """Choose a group for the request, and note that it was sent there. Returns the group's index, or -1 if no
    group is usable; then nothing is noted. `is_new`: the request counts as demand.
    """
    if is_new:
        _count(snapshot, state, request)
    g = _pick(snapshot, request, state)
    if g < 0 or g >= len(snapshot.groups) or not snapshot.groups[g].usable:
        return -1
    _sent(snapshot, g, request)
    return g


@compiled
def adjust(snapshot: Snapshot, g: int, request: Records, rows: int) -> None:
    """Add `rows` equal requests whose prompts are filled; remove them if it is negative."""
    for _ in range(rows):
        _sent(snapshot, g, request)
        _filled(snapshot, g, request)
    for _ in range(-rows):
        _ended(snapshot, g, request, True)


@compiled
def resend(snapshot: Snapshot, requests: Records, groups: Records, is_filled: Records) -> None:
    """Note again that each request [N] was sent to its group [N], and which had its first token [N]."""
    for i in range(len(requests)):
        _sent(snapshot, groups[i], requests[i])
        if is_filled[i]:
            _filled(snapshot, groups[i], requests[i])
