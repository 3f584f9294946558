"""Who asks: tenants by their API keys, and what each may have. Pure.

Keys are known by their SHA-256 only, so that neither a file of tenants nor a log holds one.
"""

from __future__ import annotations

from dataclasses import dataclass

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
