"""Choose the worker of a base for each request: the routing policy over a snapshot of requests in flight.

Pure: no clock, no network; `now_s` never goes back. `controlplane.routing` decides. `MemberSet` keeps the
workers and their room, `LiveSnapshot` the policy's input, `TrafficHistory` what earlier requests show.

Until the compiled code is ready (`start_routing`), the worker with the fewest requests gets each request.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from random import getrandbits, random

from controlplane.routing.snapshot import NO_PROMISE, RequestRow, Snapshot
from controlplane.traffic.history import TrafficHistory
from controlplane.traffic.least_outstanding import least_outstanding
from controlplane.traffic.live_snapshot import LiveSnapshot, hashed
from controlplane.traffic.member import Member, RoutedRequest
from controlplane.traffic.member_set import MemberSet, StepModels
from controlplane.traffic.request import InferenceRequest
from controlplane.traffic.worker_health import Takes
from workers.load_lines import STALE_S
from workers.messages import WorkerLoad

log = logging.getLogger(__name__)

PLACE_EVERY_S = 5.0
# A request that a worker has had for longer, while its engine has no waiting requests, is prefilled.
SEEN_S = 0.2
_UINT64 = (1 << 64) - 1


@dataclass(frozen=True)
class RoutingRules:
    """A group gets at most `in_flight_factor` times as many requests as its engine runs at once. The other
    requests wait in the gateway, where their order can still change."""

    in_flight_factor: float = 1.0


class BaseRouter:
    """The router of one base, in one gateway."""

    def __init__(self, rules: RoutingRules, now_s: float, is_ready: bool = True) -> None:
        self._live = LiveSnapshot()
        self._members = MemberSet(rules.in_flight_factor, self._live.set_usable)
        self._history = TrafficHistory()
        self._models: StepModels | None = None  # None also if nothing is known of steps
        self._last_models: StepModels | None = None
        self._begun_s = self._placed_s = now_s
        if is_ready:
            self.start_routing()

    @property
    def members(self) -> list[Member]:
        return list(self._members)

    @property
    def has_members(self) -> bool:
        return next(iter(self._members), None) is not None

    @property
    def has_room(self) -> bool:
        """Whether a worker has room for one sequence."""
        return self._members.free > 0

    @property
    def snapshot(self) -> Snapshot | None:
        """What the policy reads; None until `start_routing`."""
        return self._live.snapshot

    @property
    def error(self) -> float | None:
        """The mean relative error of predicted times per token, as corrected so far; None: unknown."""
        seen = [member.error for member in self._members if member.error > 0]
        return sum(seen) / len(seen) if seen else None

    def start_routing(self) -> None:
        """The compiled code is ready: from now on the policy decides."""
        if self._live.snapshot is None:
            self._live.make(self._members)

    # --- workers -------------------------------------------------------------------------------------------

    def set_members(self, members: Sequence[Member]) -> None:
        """These are the workers now. Requests in flight at other workers are no longer counted."""
        for gone in set(self._members).difference(members):
            self._live.leave(gone.slot)
            self._members.remove(gone)
        fresh = [member for member in members if member.slot < 0]
        for member in fresh:
            self._members.add(member, self._models)
        self._live.set_members(self._members, fresh)
        self._members.count_free()

    def set_takes(self, member: Member, takes: Takes) -> None:
        """What a worker may be sent from now on; requests in flight stay there."""
        self._members.set_takes(member, takes)

    def learn(self, models: StepModels) -> None:
        """Step times from now on. The same object again changes nothing."""
        if models is self._last_models:
            return
        self._last_models = models
        try:
            self._learn(models if len(models.models) else None)
        except Exception:  # routing without knowledge of steps is better than a failure
            log.exception("the step models cannot be used; requests are routed without predicted step times")
            self._learn(None)

    def _learn(self, models: StepModels | None) -> None:
        self._models = models
        for member in self._members:
            member.model, member.tpot_s = 0, 0.0
            self._members.set_limit(member, models)
        self._live.learn(models, self._members)
        self._members.count_free()

    # --- requests ------------------------------------------------------------------------------------------

    def send(self, request: InferenceRequest, now_s: float, is_new: bool = True) -> RoutedRequest | None:
        """Choose the worker, which is the result's `member`, and count the request as sent to it. None: no
        worker has room. `is_new`: the request was not sent before."""
        if self._members.free <= 0:
            return None
        if request.terms.sequences > 1:
            return self._send_wide(request, now_s, is_new)
        return self._send(request, now_s, is_new)

    def _send_wide(self, request: InferenceRequest, now_s: float, is_new: bool) -> RoutedRequest | None:
        """Choose among the workers that have room for all sequences of the request."""
        narrow = [m for m in self._members if m.has_room and not m.fits(request.terms.sequences)]
        if len(narrow) == self._members.free:
            return None
        with self._members.without(narrow):
            return self._send(request, now_s, is_new)

    def _send(self, request: InferenceRequest, now_s: float, is_new: bool) -> RoutedRequest:
        row = self._row(request, now_s)
        slot = self._live.choose(row, is_new)
        member = self._members.at(slot) if slot >= 0 else None
        if member is None:
            member = self._least_outstanding()
            self._live.sent(member.slot, row)
        sequences = request.terms.sequences
        self._live.add(member.slot, row, sequences - 1)
        routed = RoutedRequest(member, request, row, now_s)
        member.routed[routed] = None
        if not request.streams:
            member.unseen[routed] = None
        self._members.change(member, 1, sequences)
        if member.takes is Takes.ONE:
            self._members.set_trial(member, routed)
        self._history.sent(routed)
        return routed

    def filled(self, routed: RoutedRequest) -> None:
        """The request's first token came."""
        member = routed.member
        if routed.filled or routed.ended or member.slot < 0:
            return
        routed.filled = True
        member.unseen.pop(routed, None)
        self._live.filled(member.slot, routed.row)

    def ended(self, routed: RoutedRequest, tokens: int | None = None) -> None:
        """The request ended with N tokens; None: unknown, or broken off. A second call does nothing."""
        if routed.ended:
            return
        routed.ended = True
        request, member = routed.request, routed.member
        if tokens is not None:
            self._history.ended(request, tokens)
        if member.slot < 0:
            return
        del member.routed[routed]
        member.unseen.pop(routed, None)
        sequences = request.terms.sequences
        self._live.ended(member.slot, routed.row, routed.filled, sequences)
        self._members.change(member, -1, -sequences)
        if member.trial is routed:
            self._members.set_trial(member, None)

    def _row(self, request: InferenceRequest, now_s: float) -> RequestRow:
        """The request in the form of the snapshot. Requests of one session have one key, so that every
        gateway breaks ties in the same way for them."""
        terms = request.terms
        session = hashed(f"{request.variant} {terms.session}") if terms.session else 0
        home = self._history.home(request)
        return RequestRow(
            self._live.column(request.variant, self._members),
            float(terms.prompt_tokens),
            self._history.expected_output(request),
            math.inf if terms.ttft_s is None else terms.ttft_s,
            math.inf if terms.tpot_s is None else terms.tpot_s,
            now_s - request.arrived_s,
            session,
            terms.beginning & _UINT64,
            session or getrandbits(64),
            home.cached,
            home.slot,
            self._live.promise_of(terms.tpot_s),
        )

    def _least_outstanding(self) -> Member:
        """The worker with the fewest requests among those with room."""
        free = [member for member in self._members if member.has_room]
        return free[least_outstanding([member.places + member.foreign for member in free], random())]

    # --- what workers report -------------------------------------------------------------------------------

    def loaded(self, member: Member, load: WorkerLoad, now_s: float) -> None:
        """A worker reported its load."""
        if member.slot < 0:
            return
        member.loaded_s = now_s
        # Some requests that the worker counted may have ended since; they must not count as other gateways'.
        self._set_foreign(member, max(0, load.ongoing - max(member.peak, member.last_peak)))
        member.peak, member.last_peak = member.own, member.peak
        if load.variants != member.variants:
            member.variants = load.variants
            self._live.place_variants(member)
        self._live.correct(member, load)
        self._live.note_cached(member, load)
        if load.waiting == 0 and member.unseen:
            for routed in [r for r in member.unseen if r.sent_s < now_s - SEEN_S]:
                self.filled(routed)

    def tick(self, now_s: float) -> None:
        """To be called every second or so: forget stale reports, and let the policy place variants."""
        for member in self._members:
            if member.foreign and member.loaded_s < now_s - STALE_S:
                self._set_foreign(member, 0)
        if self._live.snapshot is not None and now_s >= self._placed_s + PLACE_EVERY_S:
            self._placed_s = now_s
            self._live.tick(now_s - self._begun_s)

    def _set_foreign(self, member: Member, foreign: int) -> None:
        """Requests of other gateways count as typical requests of the base."""
        if foreign == member.foreign:
            return
        if member.typical is not None:
            self._live.add(member.slot, member.typical, -member.foreign)
        member.typical = self._typical() if foreign else None
        if member.typical is not None:
            self._live.add(member.slot, member.typical, foreign)
        self._members.set_foreign(member, foreign)

    def _typical(self) -> RequestRow:
        prompt, output = self._history.mean_prompt, self._history.mean_output
        return RequestRow(0, prompt, output, math.inf, math.inf, 0.0, 0, 0, 0, 0.0, -1, NO_PROMISE)
