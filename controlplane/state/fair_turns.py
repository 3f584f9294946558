"""Turns among tenants that wait for the same resource: one thing of each tenant before a second of any. Pure.

So a tenant that asks for much delays itself, and delays others by at most one of its things.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

K = TypeVar("K", bound=Hashable)


@dataclass(frozen=True)
class Asked:
    """`tenant` asked for `what` at `since_s`; `begun`: it is under way."""

    tenant: str
    what: str
    since_s: float
    begun: bool = False


class Turn(NamedTuple):
    """`place` things of the same tenant go before `what`, which was requested at `since_s`."""

    place: int
    since_s: float
    what: str


def turns(asked: Iterable[Asked]) -> dict[str, Turn]:
    """The turn of each thing; the lowest is next. If several tenants ask for a thing, its best turn
    counts."""
    by_tenant: dict[str, list[Asked]] = {}
    for one in asked:
        by_tenant.setdefault(one.tenant, []).append(one)
    found: dict[str, Turn] = {}
    for theirs in by_tenant.values():
        ordered = sorted(theirs, key=lambda a: (not a.begun, a.since_s, a.what))
        first = dict.fromkeys(a.what for a in ordered)
        since_s = {a.what: a.since_s for a in reversed(ordered)}
        for place, what in enumerate(first):
            turn = Turn(place, since_s[what], what)
            found[what] = min(turn, found.get(what, turn))
    return found


def shares(counts: Mapping[K, int], room: int) -> dict[K, int]:
    """The part of `room` for each key: the same for all, up to its count; what a key does not need goes to
    the others."""
    got: dict[K, int] = {}
    for number, key in enumerate(sorted(counts, key=lambda key: counts[key])):
        got[key] = min(counts[key], max(0, room) // (len(counts) - number))
        room -= got[key]
    return got
