"""The policy's inputs and decisions, in records that are kept from step to step. Pure.

A request is described once, when it is first seen, and forgotten when it has ended: thousands may wait for
many steps. Keys count upwards: of two requests that arrived at the same instant, the one seen first comes
first. Requests and variants have numbers from 0 on, which index their records. Memory grows by doubling.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Hashable, Sequence
from operator import attrgetter
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from profiler.compiled import Records, records
from workers.scheduling.policy import BASE, NOBODY, READY, RUNNING, VARIANTS, WAITING, Rules, decide

Key = TypeVar("Key", bound=Hashable)
Numbers = npt.NDArray[np.intp]

FIRST_SIZE = 64
MOST_TOKENS = np.iinfo(np.int32).max  # a client may ask for any number

# `parent`: the request behind which it skipped the line when it began. The other fields stay while a request
# lives; `variant` is the number of the variant with this `uid` in that time.
REQUEST = np.dtype(
    [("arrival_s", "f8"), ("key", "i8"), ("parent", "i8"), ("uid", "i8"), ("variant", "i4")], align=True
)


class Request(Protocol):
    """A request of vLLM, reduced to the fields that admission needs."""

    request_id: str
    arrival_time: float
    max_tokens: int
    lora_request: Any

    @property
    def num_output_tokens(self) -> int: ...


class AdmissionRecords:
    """A step's requests and variants: `see` them, `decide`, read the decisions, and report which requests
    `began`.
    """

    def __init__(self) -> None:
        self._requests, self._numbers = _Table(REQUEST), _Numbers[str]()
        self._variants, self._uids = _Table(VARIANTS), _Numbers[int]()
        self._users: Counter[int] = Counter()  # number of requests of each variant
        self._running, self._waiting = _Table(RUNNING), _Table(WAITING)
        self._runners: Sequence[Request] = ()
        self._line: Sequence[Request] = ()
        self._line_numbers: Numbers = np.zeros(0, np.intp)
        self._next_key = 0
        self._use_variant(BASE)

    # --- before a step -------------------------------------------------------------------------

    def clear(self) -> None:
        """Remove the last step's decisions."""
        self._runners = self._line = ()
        for table in (self._running, self._waiting):
            table.resize(0)

    def see(
        self,
        running: Sequence[Request],
        waiting: Sequence[Request],
        readiness: Callable[[int], int],
        cost: Callable[[int], float],
    ) -> None:
        """Record the running and waiting requests of this step; the waiting ones in any order.

        `readiness` and `cost` are functions of a variant's uid.
        """
        runners = self._described(running)
        line = self._described(waiting)
        self._see_running(running, runners)
        self._see_waiting(waiting, line)
        found = [READY if uid == BASE else readiness(uid) for uid in self._uids.of]
        numbers = list(self._uids.of.values())
        self._variants.rows["readiness"][numbers] = found
        self._variants.rows["cost"][numbers] = [0.0 if uid == BASE else cost(uid) for uid in self._uids.of]

    def _see_running(self, running: Sequence[Request], numbers: Numbers) -> None:
        rows = self._running.resize(len(running))
        for field in ("arrival_s", "key", "parent", "variant"):
            rows[field] = self._requests.rows[field][numbers]
        rows["tokens_left"] = [min(r.max_tokens - r.num_output_tokens, MOST_TOKENS) for r in running]
        self._runners = list(running)

    def _see_waiting(self, waiting: Sequence[Request], numbers: Numbers) -> None:
        arrival = self._requests.rows["arrival_s"][numbers]
        if not (arrival[1:] > arrival[:-1]).all():  # mostly they are already in order
            order = np.lexsort((self._requests.rows["key"][numbers], arrival))
            waiting, numbers = [waiting[i] for i in order.tolist()], numbers[order]
        rows = self._waiting.resize(len(waiting))
        for field in ("arrival_s", "key", "variant"):
            rows[field] = self._requests.rows[field][numbers]
        self._line, self._line_numbers = list(waiting), numbers

    def _described(self, requests: Sequence[Request]) -> Numbers:
        """The requests' numbers. Describes new requests."""
        try:
            return self._numbers_of(requests)
        except KeyError:
            new = [request for request in requests if request.request_id not in self._numbers.of]
            for request in sorted(new, key=_arrival):
                self._describe(request)
            return self._numbers_of(requests)

    def _numbers_of(self, requests: Sequence[Request]) -> Numbers:
        known = self._numbers.of
        return np.fromiter(map(known.__getitem__, map(_id, requests)), np.intp, len(requests))

    def _describe(self, request: Request) -> None:
        number = self._numbers.give(request.request_id)
        uid = variant_of(request)
        described = (request.arrival_time, self._next_key, NOBODY, uid, self._use_variant(uid))
        self._requests.hold(number)[number] = described
        self._next_key += 1

    def _use_variant(self, uid: int) -> int:
        number = self._uids.of.get(uid)
        if number is None:
            number = self._uids.give(uid)
            self._variants.hold(number)["closed"][number] = 0
        self._users[uid] += 1
        return number

    # --- a step's decision ---------------------------------------------------------------------

    def decide(self, now_s: float, rules: Rules) -> None:
        decide(now_s, self._running.rows, self._waiting.rows, self._variants.rows, rules)

    def admitted(self) -> set[str]:
        """Ids of the waiting requests that may run."""
        return {self._line[i].request_id for i in np.flatnonzero(self._waiting.rows["admitted"]).tolist()}

    def preempted(self) -> list[Request]:
        return [self._runners[i] for i in np.flatnonzero(self._running.rows["preempts"]).tolist()]

    def blocked(self) -> list[str]:
        """Ids of the requests that wait for a running variant to end. Thread-safe."""
        blocked = self._waiting.rows["blocked"].tolist()
        return [request.request_id for request, waits in zip(self._line, blocked, strict=False) if waits]

    def first_blocked(self) -> Request | None:
        """The first request that waits for a running variant to end."""
        blocked = self._waiting.rows["blocked"]
        return self._line[int(blocked.argmax())] if blocked.any() else None

    def loads(self) -> list[int]:
        """Uids of variants that should get a slot, in this order."""
        order = self._variants.rows["load"]
        return sorted(self._uids_where(order > 0), key=lambda uid: order[self._uids.of[uid]])

    def active(self) -> frozenset[int]:
        """Uids of variants that run or may run next: they keep their slots."""
        return frozenset(self._uids_where(self._variants.rows["active"] > 0))

    def _uids_where(self, holds: npt.NDArray[np.bool_]) -> list[int]:
        return [uid for uid, number in self._uids.of.items() if holds[number]] if holds.any() else []

    # --- after a step --------------------------------------------------------------------------

    def began(self, scheduled: Container[str]) -> int:
        """Record the parents of admitted requests that began, or began again; returns how many skipped the
        line.
        """
        admitted = np.flatnonzero(self._waiting.rows["admitted"]).tolist()
        began = [i for i in admitted if self._line[i].request_id in scheduled]
        parents = self._waiting.rows["parent"][began]
        self._requests.rows["parent"][self._line_numbers[began]] = parents
        return int(np.count_nonzero(parents != NOBODY))

    def forget(self, request_id: str) -> None:
        """Forget a request that has ended."""
        number = self._numbers.take_back(request_id)
        if number is None:
            return
        uid = int(self._requests.rows["uid"][number])
        self._users[uid] -= 1
        if not self._users[uid]:
            del self._users[uid]
            self._uids.take_back(uid)

    def __len__(self) -> int:
        """The number of known requests."""
        return len(self._numbers.of)


_arrival = attrgetter("arrival_time", "request_id")
_id = attrgetter("request_id")


def variant_of(request: Request) -> int:
    """The uid of a request's variant, or BASE."""
    return request.lora_request.lora_int_id if request.lora_request else BASE


class _Table:
    """`rows` are records that keep their place in memory until there are more than ever before."""

    def __init__(self, dtype: np.dtype[Any]) -> None:
        self._all = _made(dtype, FIRST_SIZE)
        self.rows = self._all[:0]

    def resize(self, count: int) -> Records:
        """Set the number of rows; the first ones keep their contents."""
        if count > len(self._all):
            grown = _made(self._all.dtype, max(count, 2 * len(self._all)))
            grown[: len(self._all)] = self._all
            self._all, self.rows = grown, grown[:0]
        if count != len(self.rows):
            self.rows = self._all[:count]
        return self.rows

    def hold(self, number: int) -> Records:
        """Rows up to this number at least."""
        return self.resize(max(len(self.rows), number + 1))


def _made(dtype: np.dtype[Any], count: int) -> Records:
    """Records as plain arrays, with which numpy and numba are several times faster than with record
    arrays.
    """
    return records(dtype, count).view(np.ndarray)


class _Numbers(Generic[Key]):
    """Gives temporary keys numbers from 0 on; a returned number is used again."""

    def __init__(self) -> None:
        self.of: dict[Key, int] = {}
        self._free: list[int] = []

    def give(self, key: Key) -> int:
        number = self._free.pop() if self._free else len(self.of)
        self.of[key] = number
        return number

    def take_back(self, key: Key) -> int | None:
        """The number that the key had, or None."""
        number = self.of.pop(key, None)
        if number is not None:
            self._free.append(number)
        return number
