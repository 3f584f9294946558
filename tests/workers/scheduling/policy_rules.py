"""The policy's rules as plain Python over lists and sets, apart from how `policy` computes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from workers.scheduling.policy import ABSENT, BASE, NO_MEMORY, READY


class Running(NamedTuple):
    """A running request. `parent` is the request it skipped the line behind, if it did."""

    key: int
    variant: int
    arrival_s: float
    tokens_left: int
    parent: int | None = None


class Waiting(NamedTuple):
    key: int
    variant: int
    arrival_s: float


@dataclass(frozen=True)
class Snapshot:
    """`waiting` in order of arrival, and of key where that is equal. `readiness` tells of every variant."""

    now_s: float
    running: Sequence[Running]
    waiting: Sequence[Waiting]
    readiness: Mapping[int, int]
    limit: int
    longest_wait_s: float
    almost_done_tokens: int = 8


@dataclass
class Decision:
    """Keys of requests; `load` and `active` are variants, `parents` those of who skips the line."""

    admit: list[int] = field(default_factory=list)
    parents: dict[int, int] = field(default_factory=dict)
    preempt: list[int] = field(default_factory=list)
    load: list[int] = field(default_factory=list)
    blocked: list[int] = field(default_factory=list)
    active: frozenset[int] = frozenset()


def decide_by_the_rules(s: Snapshot) -> Decision:
    decision = Decision()
    in_turn = _in_turn(s, decision)
    if in_turn < len(s.waiting):
        _out_of_turn(s, in_turn, decision)
        decision.preempt = _orphans(s, s.waiting[in_turn])
    return decision


def _in_turn(s: Snapshot, decision: Decision) -> int:
    """Variants become active in order of arrival, up to the first request whose variant cannot. Its index."""
    active = {r.variant for r in s.running} - {BASE}
    in_turn = len(s.waiting)
    for index, request in enumerate(s.waiting):
        readiness = s.readiness[request.variant]
        if request.variant not in active | {BASE}:
            if readiness == NO_MEMORY or len(active) >= s.limit:
                in_turn = index
                break
            active.add(request.variant)
            if readiness == ABSENT:
                decision.load.append(request.variant)
        if readiness == READY:
            decision.admit.append(request.key)
    decision.active = frozenset(active)
    return in_turn


def _out_of_turn(s: Snapshot, in_turn: int, decision: Decision) -> None:
    """Behind a blocked request only the base's run, and children of living parents."""
    blocked = s.waiting[in_turn]
    overdue = s.now_s - blocked.arrival_s > s.longest_wait_s
    parents = {} if overdue else _parents(s, in_turn, blocked)
    for request in s.waiting[in_turn:]:
        if request.variant == BASE:
            decision.admit.append(request.key)
        elif request.variant not in decision.active:
            decision.blocked.append(request.key)
        elif request.variant in parents and s.readiness[request.variant] == READY:
            decision.admit.append(request.key)
            decision.parents[request.key] = parents[request.variant]
    if s.readiness[blocked.variant] == NO_MEMORY:
        decision.load.append(blocked.variant)


def _parents(s: Snapshot, in_turn: int, blocked: Waiting) -> dict[int, int]:
    """Of each variant the oldest that runs, but for children that came after who is blocked; else the first
    in the line of those that begin in their turn."""
    old = [r for r in s.running if r.parent is None or _place(r) < _place(blocked)]
    oldest = {r.variant: r.key for r in sorted(old, key=_place, reverse=True)}
    first = {w.variant: w.key for w in reversed(s.waiting[:in_turn])}
    return first | oldest


def _orphans(s: Snapshot, blocked: Waiting) -> list[int]:
    """Children whose parent is gone, who came after a request that is blocked, and have far to go."""
    alive = {r.key for r in s.running} | {w.key for w in s.waiting}
    orphans = [r for r in s.running if r.parent is not None and r.parent not in alive]
    young = [r for r in orphans if _place(r) > _place(blocked)]
    return [r.key for r in young if r.tokens_left > s.almost_done_tokens]


def _place(request: Running | Waiting) -> tuple[float, int]:
    return request.arrival_s, request.key
