"""Who asks: tenants by their API keys, and what each may have. Pure.

Keys are known by their SHA-256 only, so that neither a file of tenants nor a log holds one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import sha256

from controlplane.state.terms import Priority

DEFAULT_NAME = "default"


@dataclass(frozen=True)
class Tenant:
    """`weight` is its share of the engines beside other tenants whose requests wait.

    At most `max_waiting` of its requests wait for one base in one gateway (None: as many as there is room
    for), none of them above `max_priority`.
    """

    name: str = DEFAULT_NAME
    weight: float = 1.0
    max_waiting: int | None = None
    max_priority: Priority = Priority.HIGH


DEFAULT = Tenant()


@dataclass(frozen=True)
class Tenants:
    """`by_key`: tenants by the SHA-256 of each of their keys, in hexadecimal digits."""

    by_key: Mapping[str, Tenant] = field(default_factory=dict)

    def of_key(self, key: bytes) -> Tenant | None:
        """Whose key it is; None: nobody's."""
        return self.by_key.get(sha256(key).hexdigest()) if self.by_key else None


ONE_TENANT = Tenants()
