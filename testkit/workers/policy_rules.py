"""The policy's rules as plain Python over lists and sets, apart from how `policy` computes them."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
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
    """`waiting` in order of arrival, and of key where that is equal. `readiness` and `cost` tell of every
    variant; `closed` are those that the decision before closed."""

    now_s: float
    running: Sequence[Running]
    waiting: Sequence[Waiting]
    readiness: Mapping[int, int]
    limit: int
    longest_wait_s: float
    almost_done_tokens: int = 8
    cost: Mapping[int, float] = field(default_factory=lambda: defaultdict(lambda: 1.0))
    closed: frozenset[int] = frozenset()


@dataclass
class Decision:
    """Keys of requests; `load`, `active` and `closed` are variants, `parents` those of who skips the line."""

    admit: list[int] = field(default_factory=list)
    parents: dict[int, int] = field(default_factory=dict)
    preempt: list[int] = field(default_factory=list)
    load: list[int] = field(default_factory=list)
    blocked: list[int] = field(default_factory=list)
    active: frozenset[int] = frozenset()
    closed: frozenset[int] = frozenset()


def decide_by_the_rules(s: Snapshot) -> Decision:
    decision = Decision()
    in_turn = _in_turn(s, decision)
    if in_turn < len(s.waiting):
        wanted = _waited_for_too_long(s, in_turn, decision.active)
        if wanted:
            decision.closed = _closed(s, max(1, len(decision.active | wanted) - s.limit))
        _out_of_turn(s, in_turn, decision, overdue=bool(wanted))
        orphans = _orphans(s, s.waiting[in_turn])
        decision.preempt = [r.key for r in orphans if not wanted or r.variant in decision.closed]
    return decision


def _waited_for_too_long(s: Snapshot, in_turn: int, active: frozenset[int]) -> set[int]:
    late = [w.variant for w in s.waiting[in_turn:] if s.now_s - w.arrival_s > s.longest_wait_s]
    return set(late) - active - {BASE}


def _closed(s: Snapshot, count: int) -> frozenset[int]:
    """The variants that were closed before, then those with the fewest rows for their cost; the first of
    equals."""
    rows = Counter(r.variant for r in s.running if r.variant != BASE)
    density = {v: math.inf if s.cost[v] == 0 else rows[v] / s.cost[v] for v in rows}
    before = sorted(v for v in s.closed if v in rows)
    others = sorted(set(rows) - set(before), key=lambda v: (density[v], rows[v], v))
    return frozenset([*before, *others][:count])


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


def _out_of_turn(s: Snapshot, in_turn: int, decision: Decision, overdue: bool) -> None:
    """Behind a blocked request only the base's requests run, and children of living parents. Behind an
    overdue request, requests of variants that are not closed run."""
    blocked = s.waiting[in_turn]
    parents = {} if overdue else _parents(s, in_turn, blocked)
    for request in s.waiting[in_turn:]:
        if request.variant == BASE:
            decision.admit.append(request.key)
        elif request.variant not in decision.active:
            decision.blocked.append(request.key)
        elif s.readiness[request.variant] != READY:
            continue
        elif request.variant in parents:
            decision.admit.append(request.key)
            decision.parents[request.key] = parents[request.variant]
        elif overdue and request.variant not in decision.closed:
            decision.admit.append(request.key)
            decision.parents[request.key] = request.key
    if s.readiness[blocked.variant] == NO_MEMORY:
        decision.load.append(blocked.variant)


def _parents(s: Snapshot, in_turn: int, blocked: Waiting) -> dict[int, int]:
    """By variant, the oldest running request, except children that came after the blocked request. If
    there is none, the first queued request that begins in its turn."""
    old = [r for r in s.running if r.parent is None or _place(r) < _place(blocked)]
    oldest = {r.variant: r.key for r in sorted(old, key=_place, reverse=True)}
    first = {w.variant: w.key for w in reversed(s.waiting[:in_turn])}
    return first | oldest


def _orphans(s: Snapshot, blocked: Waiting) -> list[Running]:
    """Children whose parent is gone, that came after the blocked request, and that have many tokens left."""
    alive = {r.key for r in s.running} | {w.key for w in s.waiting}
    orphans = [r for r in s.running if r.parent is not None and r.parent not in alive]
    young = [r for r in orphans if _place(r) > _place(blocked)]
    return [r for r in young if r.tokens_left > s.almost_done_tokens]


def _place(request: Running | Waiting) -> tuple[float, int]:
    return request.arrival_s, request.key
