"""Connections between processes of one machine, at about half the CPU time of TCP on loopback.

The names are Linux's abstract ones. They belong to a network namespace, as loopback addresses do, and need no
file: a process of another node or Pod does not find them, whatever files it shares. A name ends with its
listener.
"""

from __future__ import annotations

import os
import secrets
import socket
import struct

_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid


def named() -> tuple[socket.socket, str]:
    """A socket that may listen, and its name, which no other process can guess. Raises OSError."""
    name = f"ostinato-{secrets.token_hex(16)}"
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.bind(f"\0{name}")
    except OSError:
        sock.close()
        raise
    return sock, name


def connected(name: str) -> socket.socket:
    """A socket that is connected to this name. Raises OSError: no process of this network namespace has the
    name, its line of connections is full, or its user is another than this process's.

    When a listener ends, another user of the machine may take its name to receive requests.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        sock.connect(f"\0{name}")  # completes or fails at once
        _check_user(sock)
    except OSError:
        sock.close()
        raise
    return sock


def _check_user(sock: socket.socket) -> None:
    found = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    uid = _CREDENTIALS.unpack(found)[1]
    if uid != os.geteuid():
        raise PermissionError(f"expected a listener of user {os.geteuid()}, got one of user {uid}")
