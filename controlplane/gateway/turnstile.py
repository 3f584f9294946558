"""Requests for one base go to a worker at once, or wait for their turn, or are refused.

A request goes at once when a worker has room and nobody waits. Else it joins the line
(`controlplane.traffic.waiting_line`), and whoever's turn it is goes when there is room.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from controlplane import errors
from controlplane.state.terms import Priority
from controlplane.traffic.admission import MIN_RETRY_S, Admission, Reason, Refused
from controlplane.traffic.host_router import Asked, Flight, HostRouter
from controlplane.traffic.waiting_line import LineLimits, Waiting

# A line that hardly moves says nothing of when it will have moved.
MAX_RETRY_S = 60.0

_SAYS = {
    Reason.FULL_LINE: "too many requests wait for '{}'; send fewer at once or try again",
    Reason.FULL_TENANT: "too many requests of tenant '{}' wait; send fewer at once or try again",
    Reason.DISPLACED: "the request lost its place in the line for '{}' to one that is more urgent, or of a"
    " tenant with less than its share of the places; try again",
    Reason.PROMISE: "the request would wait for '{}' past its target; try again, or give it more time",
}


@dataclass(eq=False, slots=True)
class _Guest:
    """Somebody who waits. `went` is whether the request was sent before, to a worker that was not there."""

    asked: Asked
    future: asyncio.Future[Flight]
    went: bool = False
    number: int = 0


class Turnstile:
    """`clock` gives seconds, and never goes back."""

    def __init__(self, host: str, router: HostRouter, places: int, clock: Callable[[], float]) -> None:
        self._host = host
        self._router = router
        self._clock = clock
        self._line = Admission(LineLimits(places))
        self._guests: dict[int, _Guest] = {}  # by their number in the line
        self._again: deque[_Guest] = deque()

    def __len__(self) -> int:
        """How many wait."""
        return len(self._line) + len(self._again)

    def standing(self) -> dict[Priority, tuple[int, float | None]]:
        """Of each priority: how many are in the line, and since when the oldest is."""
        return self._line.standing()

    def at_once(self, asked: Asked, went: bool = False) -> Flight | None:
        """As `enter`, if nobody waits and a worker has room."""
        if self._guests or self._again:
            return None
        return self._router.send(asked, self._clock(), not went)

    async def enter(
        self, asked: Asked, went: bool = False, on_wait: Callable[[], None] = lambda: None
    ) -> Flight:
        """Wait until the request goes to a worker. One that `went` before, in vain, has had its turn.
        `on_wait` is called when it has a place in the line and must wait there.

        Errors: Overloaded, with a time to retry; Late; and whatever `expire` ends those who wait with.
        """
        flight = self.at_once(asked, went)
        if flight is not None:
            return flight
        now_s = self._clock()
        guest = _Guest(asked, asyncio.get_running_loop().create_future(), went)
        if went:
            self._again.append(guest)
        else:
            self._join(guest, now_s)
        self.pump()
        if not guest.future.done():
            on_wait()
        try:
            return await guest.future
        except asyncio.CancelledError:
            self._leave(guest)
            raise

    def pump(self) -> None:
        """Let those go for whom there is room now."""
        if not (self._guests or self._again):
            return
        now_s = self._clock()
        if len(self._line):
            for waiting in self._line.drop_late(now_s):
                self._fail(waiting, late(self._host, self._guests[waiting.number].asked))
        while self._router.has_room and (guest := self._next(now_s)) is not None:
            if guest.future.done():
                continue  # it left meanwhile
            flight = self._router.send(guest.asked, now_s, not guest.went)
            if flight is None:
                self._again.appendleft(guest)
                return
            flight.waited = True
            guest.future.set_result(flight)

    def begin(self) -> None:
        """Workers came where there were none: the line begins to move."""
        self._line.begin(self._clock())
        self.pump()

    def filled(self, flight: Flight) -> None:
        """Its first token came."""
        self._router.filled(flight)
        if flight.waited:
            now_s = self._clock()
            self._line.answered(now_s - flight.sent_s, now_s)

    def expire(self, before_s: float, error: Callable[[], errors.OstinatoError]) -> None:
        """End the wait of all who came before that time."""
        for guest in [guest for guest in self._again if guest.asked.arrived_s < before_s]:
            self._again.remove(guest)
            _refuse(guest, error())
        for waiting in [w for w in self._line if self._guests[w.number].asked.arrived_s < before_s]:
            self._line.leave(waiting.number)
            self._fail(waiting, error())

    def _join(self, guest: _Guest, now_s: float) -> None:
        terms = guest.asked.terms
        joined = self._line.arrive(terms, now_s, refuses=bool(self._router.members))
        if isinstance(joined, Refused):
            raise self._refusal(joined.reason, joined.after_s, terms.tenant.name)
        guest.number = joined.waiting.number
        self._guests[guest.number] = guest
        if joined.displaced is not None:
            turn_s = self._line.turn_s(joined.displaced.terms)
            self._fail(joined.displaced, self._refusal(Reason.DISPLACED, turn_s))

    def _next(self, now_s: float) -> _Guest | None:
        if self._again:
            return self._again.popleft()
        waiting = self._line.next(now_s)
        return None if waiting is None else self._guests.pop(waiting.number)

    def _leave(self, guest: _Guest) -> None:
        """It was cancelled, perhaps just after it had its turn."""
        if guest.future.done() and not guest.future.cancelled():
            if guest.future.exception() is None:
                self._router.ended(guest.future.result())
                self.pump()
            return
        if guest in self._again:
            self._again.remove(guest)
            self.pump()  # it may have been too wide for the room that there is, and others behind it are not
        elif not guest.went and self._line.leave(guest.number):
            del self._guests[guest.number]

    def _fail(self, waiting: Waiting, error: errors.OstinatoError) -> None:
        _refuse(self._guests.pop(waiting.number), error)

    def _refusal(self, reason: Reason, after_s: float | None, tenant: str = "") -> errors.Overloaded:
        name = tenant if reason is Reason.FULL_TENANT else self._host
        retry_s = min(MAX_RETRY_S, max(MIN_RETRY_S, after_s or 0.0))
        details = {"reason": str(reason)}
        return errors.Overloaded(_SAYS[reason].format(name), details=details, retry_after_s=retry_s)


def late(host: str, asked: Asked) -> errors.Late:
    """What ends a request that is dropped because its target has passed."""
    terms = asked.terms
    named = [("TTFT", terms.ttft_s), ("deadline", terms.deadline_s)]
    targets = " and ".join(f"{name} of {limit_s:g} s" for name, limit_s in named if limit_s is not None)
    return errors.Late(
        f"the request to '{host}' was late for its {targets} and was dropped; give it more time, or have "
        "late requests finished",
        details={"reason": str(Reason.LATE)},
    )


def _refuse(guest: _Guest, error: errors.OstinatoError) -> None:
    if not guest.future.done():
        guest.future.set_exception(error)
