"""The addresses on which our processes listen, and by which others reach them."""

from __future__ import annotations

import socket
from dataclasses import dataclass

LOOPBACK = "127.0.0.1"
_ANY_INTERFACE = ("0.0.0.0", "::")
LARGEST = 65535


@dataclass(frozen=True)
class Ports:
    """The ports from `first` to `last`, of which a process takes the first free one; 0 to 0: any free
    port.
    """

    first: int = 0
    last: int = 0

    @classmethod
    def parse(cls, text: str) -> Ports:
        """Parse `9464-9527`, `9464`, or nothing for any. Errors: ValueError."""
        if not text.strip():
            return cls()
        first, dash, last = (part.strip() for part in text.partition("-"))
        parts = (first, last if dash else first)
        if not all(part.isdecimal() for part in parts) or not 1 <= int(first) <= int(parts[1]) <= LARGEST:
            raise ValueError(
                f"expected the first and the last port, from 1 to {LARGEST}, got {text!r}; "
                "write them like 9464-9527, or leave the setting empty for any free port"
            )
        return cls(int(parts[0]), int(parts[1]))

    def __str__(self) -> str:
        return f"{self.first}-{self.last}" if self.first else "any"

    def each(self) -> range:
        return range(self.first, self.last + 1)


def reached_at(host: str, port: int, node_ip: str) -> str:
    """The "ip:port" by which others reach a server on `host` of the node with this address."""
    reached = node_ip if host in _ANY_INTERFACE else host
    return f"[{reached}]:{port}" if ":" in reached else f"{reached}:{port}"


def family_of(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
