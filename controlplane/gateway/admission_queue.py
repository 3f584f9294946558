"""Admission of the requests for one base: a request goes to a worker, waits for its turn, or is refused.

A request goes at once when a worker has room and no request waits. Else it joins the queue
(`controlplane.traffic.request_queue`), and the next request of the queue goes when a worker has room.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from controlplane import errors
from controlplane.state.terms import Priority
from controlplane.traffic.admission import MIN_RETRY_S, Admission, Reason, Refused
from controlplane.traffic.base_router import BaseRouter
from controlplane.traffic.member import RoutedRequest
from controlplane.traffic.request import InferenceRequest
from controlplane.traffic.request_queue import Backlog, QueueLimits, Waiting

# The longest time to retry: a queue that hardly moves allows no forecast.
MAX_RETRY_S = 60.0

_SAYS = {
    Reason.FULL_LINE: "too many requests wait for '{}'; send fewer at once, or try again",
    Reason.FULL_TENANT: "too many requests of tenant '{}' wait; send fewer at once, or try again",
    Reason.DISPLACED: "a more urgent request, or a request of a tenant below its share, took this request's"
    " place in the queue for '{}'; try again",
    Reason.PROMISE: "the request would wait for '{}' longer than its target allows; try again later, or send"
    " a larger x-ostinato-ttft-ms or x-ostinato-deadline-ms",
}


@dataclass(eq=False, slots=True)
class _Waiter:
    """A request that waits. `resent`: it was sent before, to a worker that was gone."""

    request: InferenceRequest
    future: asyncio.Future[RoutedRequest]
    resent: bool = False
    number: int = 0


class AdmissionQueue:
    """`clock` gives seconds, and never goes back."""

    def __init__(self, base: str, router: BaseRouter, places: int, clock: Callable[[], float]) -> None:
        self._base = base
        self._router = router
        self._clock = clock
        self._admission = Admission(QueueLimits(places))
        self._waiters: dict[int, _Waiter] = {}  # by their number in the queue
        self._again: deque[_Waiter] = deque()

    def __len__(self) -> int:
        """The number of requests that wait."""
        return len(self._admission) + len(self._again)

    def backlog(self) -> dict[Priority, Backlog]:
        """The requests in the queue, by priority."""
        return self._admission.backlog()

    def at_once(self, request: InferenceRequest, resent: bool = False) -> RoutedRequest | None:
        """As `enter`, if no request waits and a worker has room; None otherwise."""
        if self._waiters or self._again:
            return None
        return self._router.send(request, self._clock(), not resent)

    async def enter(
        self, request: InferenceRequest, resent: bool = False, on_wait: Callable[[], None] = lambda: None
    ) -> RoutedRequest:
        """Wait until the request goes to a worker. A `resent` request has had its turn, and goes first.
        `on_wait` is called when the request has a place in the queue and must wait there.

        Errors: Overloaded, with a time to retry; Late; and the error that `expire` is given.
        """
        routed = self.at_once(request, resent)
        if routed is not None:
            return routed
        now_s = self._clock()
        waiter = _Waiter(request, asyncio.get_running_loop().create_future(), resent)
        if resent:
            self._again.append(waiter)
        else:
            self._join(waiter, now_s)
        self.pump()
        if not waiter.future.done():
            on_wait()
        try:
            return await waiter.future
        except asyncio.CancelledError:
            self._leave(waiter)
            raise

    def pump(self) -> None:
        """Send the next requests of the queue while workers have room."""
        if not (self._waiters or self._again):
            return
        now_s = self._clock()
        if len(self._admission):
            for waiting in self._admission.drop_late(now_s):
                self._fail(waiting, late(self._base, self._waiters[waiting.number].request))
        while self._router.has_room and (waiter := self._next(now_s)) is not None:
            if waiter.future.done():
                continue  # the client left meanwhile
            routed = self._router.send(waiter.request, now_s, not waiter.resent)
            if routed is None:
                self._again.appendleft(waiter)
                return
            routed.waited = True
            waiter.future.set_result(routed)

    def begin(self) -> None:
        """Workers came where there were none: the queue begins to move."""
        self._admission.begin(self._clock())
        self.pump()

    def filled(self, routed: RoutedRequest) -> None:
        """The request's first token came."""
        self._router.filled(routed)
        if routed.waited:
            now_s = self._clock()
            self._admission.answered(now_s - routed.sent_s, now_s)

    def expire(self, before_s: float, error: Callable[[], errors.OstinatoError]) -> None:
        """Refuse the waiting requests that arrived before this time."""
        for waiter in [waiter for waiter in self._again if waiter.request.arrived_s < before_s]:
            self._again.remove(waiter)
            _refuse(waiter, error())
        for waiting in [w for w in self._admission if self._waiters[w.number].request.arrived_s < before_s]:
            self._admission.leave(waiting.number)
            self._fail(waiting, error())

    def _join(self, waiter: _Waiter, now_s: float) -> None:
        terms = waiter.request.terms
        joined = self._admission.arrive(terms, now_s, refuses=self._router.has_members)
        if isinstance(joined, Refused):
            raise self._refusal(joined.reason, joined.after_s, terms.tenant.name)
        waiter.number = joined.waiting.number
        self._waiters[waiter.number] = waiter
        if joined.displaced is not None:
            turn_s = self._admission.turn_s(joined.displaced.terms)
            self._fail(joined.displaced, self._refusal(Reason.DISPLACED, turn_s))

    def _next(self, now_s: float) -> _Waiter | None:
        if self._again:
            return self._again.popleft()
        waiting = self._admission.next(now_s)
        return None if waiting is None else self._waiters.pop(waiting.number)

    def _leave(self, waiter: _Waiter) -> None:
        """The request was cancelled, perhaps just after its turn."""
        if waiter.future.done() and not waiter.future.cancelled():
            if waiter.future.exception() is None:
                self._router.ended(waiter.future.result())
                self.pump()
            return
        if waiter in self._again:
            self._again.remove(waiter)
            self.pump()  # the request may have been too wide for the free room, but later requests are not
        elif not waiter.resent and self._admission.leave(waiter.number):
            del self._waiters[waiter.number]

    def _fail(self, waiting: Waiting, error: errors.OstinatoError) -> None:
        _refuse(self._waiters.pop(waiting.number), error)

    def _refusal(self, reason: Reason, after_s: float | None, tenant: str = "") -> errors.Overloaded:
        name = tenant if reason is Reason.FULL_TENANT else self._base
        retry_s = min(MAX_RETRY_S, max(MIN_RETRY_S, after_s or 0.0))
        details = {"reason": str(reason)}
        return errors.Overloaded(_SAYS[reason].format(name), details=details, retry_after_s=retry_s)


def late(base: str, request: InferenceRequest) -> errors.Late:
    """The error of a request that is dropped because its target has passed."""
    terms = request.terms
    named = [("TTFT", terms.ttft_s), ("deadline", terms.deadline_s)]
    targets = " and ".join(f"{name} of {limit_s:g} s" for name, limit_s in named if limit_s is not None)
    return errors.Late(
        f"the request to '{base}' missed its {targets} and was dropped; raise that target "
        "(x-ostinato-ttft-ms, x-ostinato-deadline-ms), or set x-ostinato-late to finish",
        details={"reason": str(Reason.LATE)},
    )


def _refuse(waiter: _Waiter, error: errors.OstinatoError) -> None:
    if not waiter.future.done():
        waiter.future.set_exception(error)
