"""Which worker of a base gets a request: the routing policy over a snapshot that is kept as requests go.

Pure: no clock, no network; `now_s` never goes back. Nothing is decided here: `controlplane.routing` decides,
and this keeps what it decides by. Sums over requests are changed in place for each request, and made anew
from the requests in flight when columns or rows of the snapshot change (new step models, more workers).

Until the compiled code is ready (`start_routing`), the worker with the fewest requests gets each.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from random import getrandbits, random
from typing import Any, Protocol

import numpy as np

from controlplane.routing import bookkeeping
from controlplane.routing.dispatch import adjust, dispatch, resend
from controlplane.routing.orders import invalidate
from controlplane.routing.placements.tick import tick
from controlplane.routing.policies.choose import POLICIES
from controlplane.routing.snapshot import (
    ELSEWHERE,
    GROUP,
    IN_HOST_MEMORY,
    IN_SLOT,
    LOADING,
    NO_PROMISE,
    REQUEST,
    Snapshot,
    new_snapshot,
    promise_class,
)
from controlplane.routing.state import RouterState, new_state
from controlplane.state.terms import LatePolicy
from controlplane.traffic.last_groups import LastGroups
from controlplane.traffic.least_outstanding import least_outstanding
from controlplane.traffic.machine_code import first_record, machine_code
from controlplane.traffic.output_lengths import OutputLengths
from controlplane.traffic.request_terms import NO_TERMS, RequestTerms
from controlplane.traffic.worker_health import Takes
from profiler.compiled import Records, records
from profiler.step_time.correction import corrected, error
from profiler.step_time.records import MAX_ROWS, STEP_MODEL
from workers.load_lines import STALE_S
from workers.messages import WorkerLoad
from workers.tiers import Tier

log = logging.getLogger(__name__)

LEAST_HARM = POLICIES[0]
PLACE_EVERY_S = 5.0
# A request that a worker has for longer, while nothing waits in its engine, has its prompt filled.
SEEN_S = 0.2
_MANY = 1 << 30
_SPARE = 16
_TIERS = {Tier.DEVICE: IN_SLOT, Tier.HOST: IN_HOST_MEMORY, Tier.DISK: ELSEWHERE}


class StepModels(Protocol):
    """What is known of the steps of one base's engines: `models` [M], `variants` [M, V]; which model a group
    has, and in which column a variant is."""

    @property
    def models(self) -> Records: ...

    @property
    def variants(self) -> Records: ...

    @property
    def model_of_group(self) -> Mapping[str, int]: ...

    @property
    def variant_rows(self) -> Mapping[int, int]: ...


@dataclass(frozen=True)
class RoutingRules:
    """`policy` is a name in POLICIES. A group gets no more once it has `in_flight_factor` times the requests
    that its engine runs at once: the rest wait where they can still be ordered."""

    policy: str = LEAST_HARM
    in_flight_factor: float = 1.0


@dataclass(frozen=True, slots=True)
class Asked:
    """A request as line and router see it. `variant` is a uid, 0 for the base; `arrived_s` as `now_s`.

    One that is not `counted` is no client's. Of a whole answer no first token is seen before its last.
    """

    terms: RequestTerms = NO_TERMS
    variant: int = 0
    arrived_s: float = 0.0
    streams: bool = False
    counted: bool = True

    @property
    def first_by_s(self) -> float | None:
        """If it has no first token by then, it is dropped. None: never."""
        after_s = self.terms.dropped_after_s
        return None if after_s is None else self.arrived_s + after_s

    @property
    def whole_by_s(self) -> float | None:
        """If it has not ended by then, it is dropped. None: never."""
        terms = self.terms
        if terms.late is LatePolicy.FINISH or terms.deadline_s is None:
            return None
        return self.arrived_s + terms.deadline_s


@dataclass(eq=False)
class Member:
    """A worker that may get requests. `max_ongoing` is the most it takes at once, 0: not known.

    `own` requests of this gateway are in flight there, which take `places`, one for each of their sequences;
    and `foreign` ones of others, as it last said. `slot` is its row in the snapshot; -1: it has left. `peaks`
    are the most of `own` since its last load came, and between the two before. One that `takes` one request
    at a time has its `trial`, and is not open to more meanwhile.
    """

    group: str
    max_ongoing: int
    name: str = ""
    slot: int = field(default=-1, init=False)
    own: int = field(default=0, init=False)
    places: int = field(default=0, init=False)
    foreign: int = field(default=0, init=False)
    peaks: tuple[int, int] = field(default=(0, 0), init=False)
    limit: int = field(default=0, init=False)
    takes: Takes = field(default=Takes.ALL, init=False)
    trial: Flight | None = field(default=None, init=False, repr=False)
    is_open: bool = field(default=True, init=False)
    model: int = field(default=0, init=False)
    flights: dict[Flight, None] = field(default_factory=dict, init=False, repr=False)
    unseen: dict[Flight, None] = field(default_factory=dict, init=False, repr=False)
    typical: tuple[Any, ...] = field(default=(), init=False)
    variants: tuple[tuple[int, str], ...] = field(default=(), init=False)
    loaded_s: float = field(default=-math.inf, init=False)
    tpot_s: float = field(default=0.0, init=False)
    error: float = field(default=0.0, init=False)

    @property
    def has_room(self) -> bool:
        """For one sequence more."""
        return self.is_open and self.places + self.foreign < self.limit

    def fits(self, sequences: int) -> bool:
        """Whether it has room for a request with so many. One that nobody asks has, for any number."""
        taken = self.places + self.foreign
        return self.is_open and (taken + sequences <= self.limit or taken == 0)


@dataclass(eq=False, slots=True)
class Flight:
    """A request that was sent to `member`. `values` are its fields as a REQUEST. `waited`: in the line."""

    member: Member
    asked: Asked
    values: tuple[Any, ...]
    sent_s: float
    filled: bool = False
    ended: bool = False
    waited: bool = False


class HostRouter:
    """Of one base, in one gateway."""

    def __init__(self, rules: RoutingRules, now_s: float, is_ready: bool = True) -> None:
        """Errors: ValueError for a policy that there is not."""
        if rules.policy not in POLICIES:
            raise ValueError(f"routing policy: expected one of {', '.join(POLICIES)}; got {rules.policy!r}")
        self._rules = rules
        self._policy = POLICIES.index(rules.policy)
        self._begun_s = now_s
        self._members: list[Member | None] = []
        self._free = 0  # members with room
        self._learned: StepModels | None = None  # None also when nothing is known of any step
        self._told: StepModels | None = None
        self._columns: dict[int, int] = {0: 0}
        self._lengths = OutputLengths()
        self._last: LastGroups[Member] = LastGroups()
        self._prompt = 64.0  # the mean
        self._request = records(REQUEST, 1)
        self._record = first_record(self._request, REQUEST)
        self._placed_s = now_s
        self._snapshot: Snapshot | None = None
        self._state = new_state(1, getrandbits(63))
        if is_ready:
            self.start_routing()

    @property
    def members(self) -> list[Member]:
        return [member for member in self._members if member is not None]

    @property
    def has_room(self) -> bool:
        """Some worker has, for one sequence."""
        return self._free > 0

    @property
    def snapshot(self) -> Snapshot | None:
        """What the policy reads; None until `start_routing`."""
        return self._snapshot

    @property
    def error(self) -> float | None:
        """The mean relative error of predicted times per token, before correction; None: none was seen."""
        seen = [member.error for member in self.members if member.error > 0]
        return sum(seen) / len(seen) if seen else None

    def start_routing(self) -> None:
        """The compiled code is ready: from now on the policy decides."""
        if self._snapshot is None:
            self._make()

    # --- workers -------------------------------------------------------------------------------------------

    def set_members(self, members: Sequence[Member]) -> None:
        """These are there now. Requests in flight in others are no longer counted."""
        for gone in set(self.members).difference(members):
            self._leave(gone)
        fresh = [member for member in members if member.slot < 0]
        for member in fresh:
            if None not in self._members:
                self._members.append(None)
            member.slot = self._members.index(None)
            self._members[member.slot] = member
            self._set_limit(member)
        if self._snapshot is not None and len(self._members) > len(self._snapshot.groups):
            self._make()
        else:
            for member in fresh:
                self._enter(member)
        self._count_free()

    def _leave(self, member: Member) -> None:
        self._members[member.slot] = None
        if self._snapshot is not None:
            self._snapshot.groups[member.slot] = np.zeros((), GROUP)
            self._snapshot.held[:, member.slot] = 0
            invalidate(self._snapshot)
        member.slot = -1
        member.flights.clear()
        member.unseen.clear()

    def _enter(self, member: Member) -> None:
        if self._snapshot is None:
            return
        group = self._snapshot.groups[member.slot]
        group.correction, group.stretch, group.tightest, group.ceiling = 1.0, 1.0, NO_PROMISE, 99
        group.key, group.model, group.healthy = _hash(member.group or member.name), member.model, 1
        group.usable = int(member.has_room)
        invalidate(self._snapshot)

    def _set_limit(self, member: Member) -> None:
        most = member.max_ongoing or _MANY
        if self._learned is None:
            member.limit = most
            return
        member.model = self._learned.model_of_group.get(member.group, 0)
        rows = math.ceil(self._rules.in_flight_factor * int(self._learned.models[member.model].max_rows))
        member.limit = min(most, max(1, rows))

    def _count_free(self) -> None:
        self._free = sum(member.has_room for member in self.members)

    def learn(self, models: StepModels) -> None:
        """What steps take, from now on. The same object again changes nothing."""
        if models is self._told:
            return
        self._told = models
        try:
            self._learn(models if len(models.models) else None)
        except Exception:  # a router that knows nothing of steps is better than one that fails
            log.exception("the step models cannot be used; requests go on as if nothing were known of steps")
            self._learn(None)

    def _learn(self, models: StepModels | None) -> None:
        self._learned = models
        for member in self.members:
            member.model, member.tpot_s = 0, 0.0
            self._set_limit(member)
        if self._snapshot is not None:
            self._make()
        self._count_free()

    # --- requests ------------------------------------------------------------------------------------------

    def send(self, asked: Asked, now_s: float, is_new: bool = True) -> Flight | None:
        """The request goes to `Flight.member`. None: no worker has room for it. `is_new`: it was not sent
        before."""
        if self._free <= 0:
            return None
        if asked.terms.sequences > 1:
            return self._send_wide(asked, now_s, is_new)
        return self._send(asked, now_s, is_new)

    def _send_wide(self, asked: Asked, now_s: float, is_new: bool) -> Flight | None:
        """To one of those that have room for all its sequences: the others are closed meanwhile."""
        narrow = [m for m in self.members if m.has_room and not m.fits(asked.terms.sequences)]
        if len(narrow) == self._free:
            return None
        for member in narrow:
            self._open(member, False)
        try:
            return self._send(asked, now_s, is_new)
        finally:
            for member in narrow:
                self._open(member, True)

    def _open(self, member: Member, is_open: bool) -> None:
        had_room, member.is_open = member.has_room, is_open
        self._renew_room(member, had_room)

    def _send(self, asked: Asked, now_s: float, is_new: bool) -> Flight:
        values = self._values(asked, now_s)
        member = None if self._snapshot is None else self._chosen(values, is_new)
        if member is None:
            member = self._least()
            self._note_sent(member, values)
        self._add_rows(member, values, asked.terms.sequences - 1)
        flight = Flight(member, asked, values, now_s)
        member.flights[flight] = None
        if not asked.streams:
            member.unseen[flight] = None
        self._change(member, 1, asked.terms.sequences)
        if member.takes is Takes.ONE:
            member.trial = flight
            self._reopen(member)
        if asked.terms.session or asked.terms.beginning:
            self._remember(member, asked, values)
        self._prompt += (asked.terms.prompt_tokens - self._prompt) / 32
        return flight

    def filled(self, flight: Flight) -> None:
        """Its first token came."""
        member = flight.member
        if flight.filled or flight.ended or member.slot < 0:
            return
        flight.filled = True
        member.unseen.pop(flight, None)
        if self._snapshot is not None:
            self._request[0] = flight.values
            self._filled(self._snapshot, member.slot, self._record)
            if flight.asked.variant:
                self._where[flight.values[0], member.slot] = IN_SLOT

    def ended(self, flight: Flight, tokens: int | None = None) -> None:
        """It ended, with so many tokens; None: not known, or broken off. A second call does nothing."""
        if flight.ended:
            return
        flight.ended = True
        if tokens is not None:
            self._lengths.observe(flight.asked.variant, tokens // flight.asked.terms.sequences)
        member = flight.member
        if member.slot < 0:
            return
        del member.flights[flight]
        member.unseen.pop(flight, None)
        if self._snapshot is not None:
            self._request[0] = flight.values
            self._ended(self._snapshot, member.slot, self._record, flight.filled)
            self._add_rows(member, flight.values, 1 - flight.asked.terms.sequences)
        self._change(member, -1, -flight.asked.terms.sequences)
        if member.trial is flight:
            member.trial = None
            self._reopen(member)

    def set_takes(self, member: Member, takes: Takes) -> None:
        """What a worker may be sent from now on; what it has stays there."""
        if takes is not member.takes and member.slot >= 0:
            member.takes, member.trial = takes, None
            self._reopen(member)

    def _reopen(self, member: Member) -> None:
        is_free = member.takes is Takes.ONE and member.trial is None
        self._open(member, member.takes is Takes.ALL or is_free)

    def _add_rows(self, member: Member, values: tuple[Any, ...], rows: int) -> None:
        """Sequences beside a request's first: they share its prompt, which is filled once."""
        if rows and self._snapshot is not None:
            self._request[0] = values
            adjust(self._snapshot, member.slot, self._record, rows)

    def _values(self, asked: Asked, now_s: float) -> tuple[Any, ...]:
        """Its fields as a REQUEST. Requests of one session have one key, so ties put it in one place,
        whichever gateway gets them."""
        terms = asked.terms
        session = _hash(f"{asked.variant} {terms.session}") if terms.session else 0
        home, cached = -1, 0.0
        last = None
        if session or terms.beginning:
            last = self._last.find((asked.variant, terms.session)) if session else None
            last = last or self._last.find(terms.beginning)
        if last is not None and last.group.slot >= 0:
            home, cached = last.group.slot, min(last.tokens, float(terms.prompt_tokens))
        tpot_s = terms.tpot_s
        return (
            self._column(asked.variant),
            float(terms.prompt_tokens),
            self._lengths.expected(asked.variant, terms.output_limit),
            math.inf if terms.ttft_s is None else terms.ttft_s,
            math.inf if tpot_s is None else tpot_s,
            now_s - asked.arrived_s,
            session,
            terms.beginning & (1 << 64) - 1,
            session or getrandbits(64),
            cached,
            home,
            NO_PROMISE if tpot_s is None or self._snapshot is None else promise_class(tpot_s),
        )

    def _chosen(self, values: tuple[Any, ...], is_new: bool) -> Member | None:
        snapshot = self._snapshot
        assert snapshot is not None
        self._request[0] = values
        g = self._dispatch(self._policy, snapshot, self._record, self._state, is_new)
        if g < 0:
            return None
        if values[0] and self._where[values[0], g] < LOADING:
            self._where[values[0], g] = LOADING
        return self._members[g]

    def _note_sent(self, member: Member, values: tuple[Any, ...]) -> None:
        if self._snapshot is not None:
            self._request[0] = values
            bookkeeping.sent(self._snapshot, member.slot, self._record)

    def _least(self) -> Member:
        """Of those with room the one with the fewest requests."""
        free = [member for member in self.members if member.has_room]
        return free[least_outstanding([member.places + member.foreign for member in free], random())]

    def _remember(self, member: Member, asked: Asked, values: tuple[Any, ...]) -> None:
        terms = asked.terms
        if terms.session:
            self._last.note((asked.variant, terms.session), member, values[1] + values[2])
        if terms.beginning:
            self._last.note(terms.beginning, member, min(values[1], 1024.0))

    def _change(self, member: Member, own: int, places: int) -> None:
        # `has_room` without a call
        had_room = member.is_open and member.places + member.foreign < member.limit
        member.places += places
        member.own += own
        if member.own > member.peaks[0]:
            member.peaks = (member.own, member.peaks[1])
        if (member.is_open and member.places + member.foreign < member.limit) is not had_room:
            self._renew_room(member, had_room)

    def _renew_room(self, member: Member, had_room: bool) -> None:
        has_room = member.has_room
        if has_room is had_room:
            return
        self._free += 1 if has_room else -1
        if self._snapshot is not None and self._snapshot.orders.size:
            bookkeeping.set_usable(self._snapshot, member.slot, has_room)
        elif self._snapshot is not None:
            self._usable[member.slot] = has_room  # a call of compiled code takes longer

    # --- what workers push ---------------------------------------------------------------------------------

    def loaded(self, member: Member, load: WorkerLoad, now_s: float) -> None:
        """A worker said what it has to do."""
        if member.slot < 0:
            return
        member.loaded_s = now_s
        # Some of our own requests that it counted may have ended since, and must not be taken for others'.
        self._set_foreign(member, max(0, load.ongoing - max(member.peaks)))
        member.peaks = (member.own, member.peaks[0])
        if load.variants != member.variants:
            member.variants = load.variants
            self._place_variants(member)
        self._correct(member, load)
        self._note_cached(member, load)
        if load.waiting == 0 and member.unseen:
            for flight in [f for f in member.unseen if f.sent_s < now_s - SEEN_S]:
                self.filled(flight)

    def tick(self, now_s: float) -> None:
        """Every second or so: forget what is stale, and let the policy place anew."""
        for member in self.members:
            if member.foreign and member.loaded_s < now_s - STALE_S:
                self._set_foreign(member, 0)
        if self._snapshot is not None and now_s >= self._placed_s + PLACE_EVERY_S:
            self._placed_s = now_s
            tick(self._snapshot, self._state, self._policy, now_s - self._begun_s)

    def _set_foreign(self, member: Member, foreign: int) -> None:
        """Others' requests count as typical ones of the base."""
        if foreign == member.foreign:
            return
        had_room = member.has_room
        if self._snapshot is not None and member.foreign:
            self._request[0] = member.typical
            adjust(self._snapshot, member.slot, self._record, -member.foreign)
        member.foreign = foreign
        member.typical = self._typical()
        if self._snapshot is not None and foreign:
            self._request[0] = member.typical
            adjust(self._snapshot, member.slot, self._record, foreign)
        self._renew_room(member, had_room)

    def _typical(self) -> tuple[Any, ...]:
        output = self._lengths.expected(-1, 0)
        return (0, self._prompt, output, math.inf, math.inf, 0.0, 0, 0, 0, 0.0, -1, NO_PROMISE)

    def _place_variants(self, member: Member) -> None:
        """Where the worker has variants; what is asked there and not in a slot is on its way."""
        if self._snapshot is None:
            return
        held = self._snapshot.held[:, member.slot]
        where = np.full(len(held), ELSEWHERE, np.int32)
        for uid, tier in member.variants:
            column = self._columns.get(uid)
            if column is not None:
                where[column] = _TIERS[Tier(tier)]
        where[(held.rows > 0) & (where < LOADING)] = LOADING
        held.where = where

    def _correct(self, member: Member, load: WorkerLoad) -> None:
        if self._snapshot is None or self._learned is None:
            return
        group = self._snapshot.groups[member.slot]
        before_s, member.tpot_s = member.tpot_s, float(group.tpot_s)
        seen = [seconds for seconds in (before_s, member.tpot_s) if seconds > 0]
        if not seen or load.steps <= 0:
            return
        predicted_s = sum(seen) / len(seen)
        observed_s, steps = load.steps * load.step_s, float(load.steps)
        member.error = float(error(member.error, observed_s, predicted_s, steps))
        group.correction = corrected(float(group.correction), observed_s, predicted_s, steps)
        bookkeeping.renew(self._snapshot, member.slot)
        member.tpot_s = float(group.tpot_s)

    def _note_cached(self, member: Member, load: WorkerLoad) -> None:
        """How much longer, or shorter, its requests are than was expected. While some of them wait, the KV
        cache does not hold all, so that says nothing."""
        if self._snapshot is None or self._learned is None or load.waiting:
            return
        tokens = load.kv_usage * float(self._snapshot.models[member.model].kv_tokens)
        bookkeeping.cached(self._snapshot, member.slot, tokens)

    # --- the snapshot made anew ----------------------------------------------------------------------------

    def _column(self, uid: int) -> int:
        column = self._columns.get(uid)
        if column is None:
            if self._snapshot is not None and len(self._columns) >= self._snapshot.held.shape[0]:
                self._make(self._in_use())
            column = self._columns[uid] = self._next_column()
            for member in self.members:
                if any(uid == there for there, _ in member.variants):
                    self._place_variants(member)
        return column

    def _next_column(self) -> int:
        return max(self._columns.values()) + 1

    def _in_use(self) -> set[int]:
        return {flight.asked.variant for member in self.members for flight in member.flights}

    def _make(self, keep: Iterable[int] | None = None) -> None:
        """The snapshot from what is known: members, step models, requests in flight.

        Variants that no step model knows keep a column while they are in `keep` (None: all).
        """
        models, variants, columns = self._known()
        for uid in self._columns if keep is None else keep:
            if uid not in columns:
                columns[uid] = max(columns.values()) + 1
        width = max(columns.values()) + 1 + max(_SPARE, len(columns))
        before = {member: self._kept(member) for member in self.members}
        snapshot = new_snapshot(max(4, 2 * len(self._members)), width, models)
        snapshot.variants[:, : variants.shape[1]] = variants
        snapshot.groups.usable = snapshot.groups.healthy = 0
        self._state = self._moved(new_state(width, 0), columns)
        self._snapshot, self._columns = snapshot, columns
        self._where, self._usable = np.asarray(snapshot.held.where), np.asarray(snapshot.groups.usable)
        self._dispatch = machine_code(dispatch, self._policy, snapshot, self._record, self._state, True)
        self._filled = machine_code(bookkeeping.filled, snapshot, 0, self._record)
        self._ended = machine_code(bookkeeping.ended, snapshot, 0, self._record, True)
        for member in self.members:
            self._enter(member)
            group = snapshot.groups[member.slot]
            group.correction, group.stretch, group.ceiling = before[member]
        self._resend(snapshot)
        for member in self.members:
            self._place_variants(member)

    def _kept(self, member: Member) -> tuple[float, float, int]:
        """What was learned of its engine: correction, stretch; and its ceiling."""
        if self._snapshot is None or member.slot >= len(self._snapshot.groups):
            return 1.0, 1.0, 99
        group = self._snapshot.groups[member.slot]
        return float(group.correction) or 1.0, float(group.stretch) or 1.0, int(group.ceiling)

    def _known(self) -> tuple[Records, Records, dict[int, int]]:
        """Step models and variants in memory of our own, so that compiled code sees one kind of array."""
        if self._learned is None:
            models = equal_rows()
            return models, new_snapshot(0, 1, models).variants, {0: 0}
        models = records(STEP_MODEL, len(self._learned.models))
        models[:] = self._learned.models
        return models, self._learned.variants, {0: 0, **self._learned.variant_rows}

    def _moved(self, state: RouterState, columns: Mapping[int, int]) -> RouterState:
        """What the policy keeps, with variants in their new columns."""
        old = self._state
        for uid, column in columns.items():
            was = self._columns.get(uid)
            if was is not None and was < len(old.homes):
                state.homes[column], state.demand[column] = old.homes[was], old.demand[was]
        return state._replace(chance=old.chance, classes=old.classes, pools=old.pools, clock=old.clock)

    def _resend(self, snapshot: Snapshot) -> None:
        flights = [flight for member in self.members for flight in member.flights]
        requests = records(REQUEST, len(flights))
        groups, filled = np.zeros(len(flights), np.int64), np.zeros(len(flights), np.bool_)
        for i, flight in enumerate(flights):
            promise = NO_PROMISE if math.isinf(flight.values[4]) else promise_class(flight.values[4])
            flight.values = (self._columns[flight.asked.variant], *flight.values[1:-1], promise)
            requests[i], groups[i], filled[i] = flight.values, flight.member.slot, flight.filled
        resend(snapshot, requests, groups, filled)
        for flight in flights:
            self._add_rows(flight.member, flight.values, flight.asked.terms.sequences - 1)
        for member in self.members:
            if member.foreign:
                self._request[0] = member.typical
                adjust(snapshot, member.slot, self._record, member.foreign)


def equal_rows() -> Records:
    """[1], a step model in which every row costs the same, and nothing else anything: without knowledge the
    cheapest worker is the one with the fewest requests."""
    model = records(STEP_MODEL, 1)
    model.decode_s[:] = 1e-3 * np.arange(MAX_ROWS + 1)
    model.prefill_grain = 1.0
    model.batched_tokens = model.max_rows = model.kv_tokens = model.slots = _MANY
    return model


def _hash(text: str) -> int:
    """Of 63 bits, the same in every process, and not 0."""
    return int.from_bytes(blake2b(text.encode(errors="replace"), digest_size=8).digest()) >> 1 | 1
