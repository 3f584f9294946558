"""Which waiting requests may be admitted, and which running ones must step back. Pure.

DeltaZip, section 5.4: at most N variants run at once. A request whose variant runs already may skip
the line; it is then the child of that variant's oldest running request, and when that parent is done
its children are preempted, so that requests of other variants, which came earlier, get their turn.
Beyond the paper: a child that is about to finish is not preempted; once somebody has waited too long
nobody skips the line until they run; and who lacks room in memory counts as blocked, too.

From this follows a bound: whatever comes later, a request begins no later than when all that came
before it are done, plus what an almost finished child may still take, plus its variant's loading.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

BASE = 0


class Readiness(StrEnum):
    """Where a variant is, as far as admission is concerned."""

    READY = "ready"  # in a slot on every rank
    LOADING = "loading"  # on its way into a slot
    NO_MEMORY = "no_memory"  # there is no room for it in some rank's memory until others leave
    ABSENT = "absent"


class Running(NamedTuple):
    """A running request. `parent` is the request it skipped the line behind, if it did.
    `tokens_left` is the most it may still generate."""

    id: str
    variant: int
    arrival_s: float
    tokens_left: int
    parent: str | None = None


class Waiting(NamedTuple):
    id: str
    variant: int
    arrival_s: float


@dataclass(frozen=True)
class Snapshot:
    """`waiting` in order of arrival, and of id where that is equal. `readiness` tells of every variant
    that occurs (BASE is READY)."""

    now_s: float
    running: Sequence[Running]
    waiting: Sequence[Waiting]
    readiness: Mapping[int, Readiness]
    limit: int
    longest_wait_s: float
    almost_done_tokens: int = 8


@dataclass
class Decision:
    """`admit` in order; `parents` of those among them that skip the line; `preempt` first of all;
    `load` are variants that should get a slot, `blocked` requests wait for a running variant to end.
    `active_variants` are all variants that run or may run next: no slot is taken from one of them."""

    admit: list[str] = field(default_factory=list)
    parents: dict[str, str] = field(default_factory=dict)
    preempt: list[str] = field(default_factory=list)
    load: list[int] = field(default_factory=list)
    blocked: list[str] = field(default_factory=list)
    active_variants: frozenset[int] = frozenset()


def decide(snapshot: Snapshot) -> Decision:
    """One step's admissions. Linear in running and waiting requests."""
    decision = Decision()
    in_turn = _in_turn(snapshot, decision)
    if in_turn < len(snapshot.waiting):
        _out_of_turn(snapshot, in_turn, decision)
        decision.preempt = _orphans(snapshot, snapshot.waiting[in_turn])
    return decision


def _in_turn(snapshot: Snapshot, decision: Decision) -> int:
    """Activate variants in order of arrival, up to the first request whose variant cannot be. Its index."""
    active_variants = {r.variant for r in snapshot.running} - {BASE}
    index = 0
    for request in snapshot.waiting:
        variant = request.variant
        readiness = snapshot.readiness[variant]
        if variant != BASE and variant not in active_variants:
            if readiness is Readiness.NO_MEMORY or len(active_variants) >= snapshot.limit:
                break
            active_variants.add(variant)  # even while it loads: those behind may not take its place
            if readiness is Readiness.ABSENT:
                decision.load.append(variant)
        if readiness is Readiness.READY:
            decision.admit.append(request.id)
        index += 1
    decision.active_variants = frozenset(active_variants)
    return index


def _out_of_turn(snapshot: Snapshot, in_turn: int, decision: Decision) -> None:
    """Behind a blocked request only the base's run, and children of living parents."""
    blocked = snapshot.waiting[in_turn]
    overdue = snapshot.now_s - blocked.arrival_s > snapshot.longest_wait_s
    parents = {} if overdue else _parents(snapshot, in_turn, blocked)
    for request in snapshot.waiting[in_turn:]:
        variant = request.variant
        if variant == BASE:
            decision.admit.append(request.id)
        elif variant not in decision.active_variants:
            decision.blocked.append(request.id)
        elif variant in parents and snapshot.readiness[variant] is Readiness.READY:
            decision.admit.append(request.id)
            decision.parents[request.id] = parents[variant]
    if snapshot.readiness[blocked.variant] is Readiness.NO_MEMORY:
        decision.load.append(blocked.variant)  # this one only: two would take each other's room


def _parents(snapshot: Snapshot, in_turn: int, blocked: Waiting) -> dict[int, str]:
    """For each variant, behind whom its requests may skip the line."""
    admitted = {w.variant: w.id for w in reversed(snapshot.waiting[:in_turn])}
    return admitted | _oldest_running(snapshot.running, blocked)


def _oldest_running(running: Sequence[Running], blocked: Waiting) -> dict[int, str]:
    """Each variant's oldest running request, other than children that came after who is blocked."""
    oldest: dict[int, Running] = {}
    for request in running:
        if request.parent is None or not _came_after(request, blocked):
            best = oldest.get(request.variant)
            if best is None or _came_after(best, request):
                oldest[request.variant] = request
    return {variant: request.id for variant, request in oldest.items()}


def _orphans(snapshot: Snapshot, blocked: Waiting) -> list[str]:
    """Children whose parent is gone, who came after a request that is blocked, and have far to go."""
    children = [r for r in snapshot.running if r.parent is not None and _came_after(r, blocked)]
    if not children:
        return []
    alive = {r.id for r in snapshot.running} | {w.id for w in snapshot.waiting}
    return [r.id for r in children if r.parent not in alive and r.tokens_left > snapshot.almost_done_tokens]


def _came_after(one: Running | Waiting, other: Running | Waiting) -> bool:
    return (one.arrival_s, one.id) > (other.arrival_s, other.id)
