"""Which waiting requests may be admitted, and which running ones must step back. Pure.

DeltaZip, section 5.4: at most N variants run at once. A request whose variant runs already may skip
the line; it is then the child of that variant's oldest running request, and when that parent is done
its children are preempted, so that requests of other variants, which came earlier, get their turn.
Beyond the paper: a child that is about to finish is not preempted, and once somebody has waited too
long nobody skips the line until they run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

BASE = 0


class Readiness(StrEnum):
    """Where a variant is, as far as admission is concerned."""

    READY = "ready"  # in a slot on every rank
    LOADING = "loading"  # on its way into a slot
    ABSENT = "absent"


@dataclass(frozen=True)
class Running:
    """A running request. `parent` is the request it skipped the line behind, if it did.
    `tokens_left` is the most it may still generate."""

    id: str
    variant: int
    arrival_s: float
    tokens_left: int
    parent: str | None = None


@dataclass(frozen=True)
class Waiting:
    id: str
    variant: int
    arrival_s: float


@dataclass(frozen=True)
class Snapshot:
    """`waiting` in order of arrival. `readiness` tells of every variant that occurs (BASE is READY)."""

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
    `seats` are all variants that run or may run next: no slot is taken from one of them."""

    admit: list[str] = field(default_factory=list)
    parents: dict[str, str] = field(default_factory=dict)
    preempt: list[str] = field(default_factory=list)
    load: list[int] = field(default_factory=list)
    blocked: list[str] = field(default_factory=list)
    seats: frozenset[int] = frozenset()


def decide(snapshot: Snapshot) -> Decision:
    """One step's admissions. Linear in running and waiting requests."""
    decision = Decision()
    oldest = _oldest_running(snapshot.running)
    seats = {r.variant for r in snapshot.running} - {BASE}
    overdue = False
    first_blocked: Waiting | None = None
    for request in snapshot.waiting:
        if request.variant == BASE:
            decision.admit.append(request.id)
            continue
        if request.variant not in seats:
            if len(seats) >= snapshot.limit:
                decision.blocked.append(request.id)
                first_blocked = first_blocked or request
                overdue = overdue or snapshot.now_s - request.arrival_s > snapshot.longest_wait_s
                continue
            seats.add(request.variant)  # its seat, even while it loads: those behind may not take it
            if snapshot.readiness[request.variant] is Readiness.ABSENT:
                decision.load.append(request.variant)
        if snapshot.readiness[request.variant] is not Readiness.READY:
            continue
        if first_blocked is None:
            decision.admit.append(request.id)
        elif not overdue:
            decision.admit.append(request.id)
            decision.parents[request.id] = oldest.get(request.variant, request.id)
    decision.seats = frozenset(seats)
    if first_blocked is not None:
        decision.preempt = _orphans(snapshot, first_blocked)
    return decision


def _oldest_running(running: Sequence[Running]) -> dict[int, str]:
    """For each variant the running request that came first among those that did not skip the line."""
    found: dict[int, Running] = {}
    for request in running:
        if request.parent is None:
            best = found.get(request.variant)
            if best is None or request.arrival_s < best.arrival_s:
                found[request.variant] = request
    return {variant: request.id for variant, request in found.items()}


def _orphans(snapshot: Snapshot, blocked: Waiting) -> list[str]:
    """Children whose parent is gone, who came after a request that is blocked, and have far to go."""
    alive = {r.id for r in snapshot.running}
    return [
        r.id
        for r in snapshot.running
        if r.parent is not None
        and r.parent not in alive
        and r.arrival_s > blocked.arrival_s
        and r.tokens_left > snapshot.almost_done_tokens
    ]
