"""A worker that may get requests, and the requests that were routed to it. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from controlplane.routing.snapshot import RequestRow
from controlplane.traffic.request import InferenceRequest
from controlplane.traffic.worker_health import Takes


@dataclass(eq=False)
class Member:
    """A worker that may get requests. `max_ongoing` is the most requests that it takes at once, 0: unknown.

    `own` requests of this gateway are in flight at the worker, and take `places`: one for each sequence.
    `foreign` is the number of requests of other gateways, as the worker last reported; `typical` stands for
    each. `slot` is the worker's row in the snapshot; -1: the worker has left. `peak` is the largest value of
    `own` since the worker's last report, `last_peak` between the two reports before. A worker that `takes`
    one request at a time has a `trial`, and gets no other request until it ends.
    """

    group: str
    max_ongoing: int
    name: str = ""
    slot: int = field(default=-1, init=False)
    own: int = field(default=0, init=False)
    places: int = field(default=0, init=False)
    foreign: int = field(default=0, init=False)
    peak: int = field(default=0, init=False)
    last_peak: int = field(default=0, init=False)
    limit: int = field(default=0, init=False)
    takes: Takes = field(default=Takes.ALL, init=False)
    trial: RoutedRequest | None = field(default=None, init=False, repr=False)
    is_open: bool = field(default=True, init=False)
    model: int = field(default=0, init=False)
    routed: dict[RoutedRequest, None] = field(default_factory=dict, init=False, repr=False)
    unseen: dict[RoutedRequest, None] = field(default_factory=dict, init=False, repr=False)
    typical: RequestRow | None = field(default=None, init=False, repr=False)
    variants: tuple[tuple[int, str], ...] = field(default=(), init=False)
    loaded_s: float = field(default=-math.inf, init=False)
    tpot_s: float = field(default=0.0, init=False)
    error: float = field(default=0.0, init=False)

    @property
    def has_room(self) -> bool:
        """Whether the worker has room for one more sequence."""
        return self.is_open and self.places + self.foreign < self.limit

    def fits(self, sequences: int) -> bool:
        """Whether the worker has room for a request of N sequences. An idle worker has, for any N."""
        taken = self.places + self.foreign
        return self.is_open and (taken + sequences <= self.limit or taken == 0)


@dataclass(eq=False, slots=True)
class RoutedRequest:
    """A request that was routed to `member`; `row` is the request in the routing snapshot. `waited`: the
    request waited in the queue before."""

    member: Member
    request: InferenceRequest
    row: RequestRow
    sent_s: float
    filled: bool = False
    ended: bool = False
    waited: bool = False
