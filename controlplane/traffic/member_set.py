"""The workers of one base, and how many of them have room. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Protocol

from controlplane.traffic.member import Member, RoutedRequest
from controlplane.traffic.worker_health import Takes
from profiler.compiled import Records

_UNLIMITED = 1 << 30


class StepModels(Protocol):
    """Step times of one base's engines: `models` [M], `variants` [M, V]; the model of each group, and the
    column of each variant."""

    @property
    def models(self) -> Records: ...

    @property
    def variants(self) -> Records: ...

    @property
    def model_of_group(self) -> Mapping[str, int]: ...

    @property
    def variant_rows(self) -> Mapping[int, int]: ...


class MemberSet:
    """`on_room(member, has_room)` is called at each change of a member's room."""

    def __init__(self, in_flight_factor: float, on_room: Callable[[Member, bool], None]) -> None:
        self._slots: list[Member | None] = []
        self._in_flight_factor = in_flight_factor
        self._on_room = on_room
        self.free = 0  # members with room

    def __iter__(self) -> Iterator[Member]:
        return (member for member in self._slots if member is not None)

    @property
    def slots(self) -> int:
        """Rows that a snapshot needs, those of members that left included."""
        return len(self._slots)

    def at(self, slot: int) -> Member | None:
        return self._slots[slot]

    def routed(self) -> list[RoutedRequest]:
        """The requests in flight at all members."""
        return [routed for member in self for routed in member.routed]

    # --- who is a member -----------------------------------------------------------------------------------

    def add(self, member: Member, models: StepModels | None) -> None:
        if None not in self._slots:
            self._slots.append(None)
        member.slot = self._slots.index(None)
        self._slots[member.slot] = member
        self.set_limit(member, models)

    def remove(self, member: Member) -> None:
        """Requests in flight at the member are no longer counted."""
        self._slots[member.slot] = None
        member.slot = -1
        member.routed.clear()
        member.unseen.clear()

    def set_limit(self, member: Member, models: StepModels | None) -> None:
        """The most sequences at once: what the worker takes, and what its engine runs at once."""
        most = member.max_ongoing or _UNLIMITED
        if models is None:
            member.limit = most
            return
        member.model = models.model_of_group.get(member.group, 0)
        rows = math.ceil(self._in_flight_factor * int(models.models[member.model].max_rows))
        member.limit = min(most, max(1, rows))

    def count_free(self) -> None:
        """Count the members with room again, after members or limits changed."""
        self.free = sum(member.has_room for member in self)

    # --- room ----------------------------------------------------------------------------------------------

    def change(self, member: Member, own: int, places: int) -> None:
        """Add to the requests of this gateway in flight at the member, and to the places that they take."""
        # `has_room` without a call
        had_room = member.is_open and member.places + member.foreign < member.limit
        member.places += places
        member.own += own
        member.peak = max(member.peak, member.own)
        if (member.is_open and member.places + member.foreign < member.limit) is not had_room:
            self._renew(member, had_room)

    def set_foreign(self, member: Member, foreign: int) -> None:
        had_room, member.foreign = member.has_room, foreign
        self._renew(member, had_room)

    def set_takes(self, member: Member, takes: Takes) -> None:
        """Whether the worker takes all requests, one at a time, or none; requests in flight stay there."""
        if takes is not member.takes and member.slot >= 0:
            member.takes = takes
            self.set_trial(member, None)

    def set_trial(self, member: Member, trial: RoutedRequest | None) -> None:
        """A worker that takes one request at a time is open while it has no trial."""
        member.trial = trial
        is_free = member.takes is Takes.ONE and trial is None
        self._open(member, member.takes is Takes.ALL or is_free)

    @contextmanager
    def without(self, members: Sequence[Member]) -> Iterator[None]:
        """Close these members for a while: none of them is chosen."""
        for member in members:
            self._open(member, False)
        try:
            yield
        finally:
            for member in members:
                self._open(member, True)

    def _open(self, member: Member, is_open: bool) -> None:
        had_room, member.is_open = member.has_room, is_open
        self._renew(member, had_room)

    def _renew(self, member: Member, had_room: bool) -> None:
        has_room = member.has_room
        if has_room is not had_room:
            self.free += 1 if has_room else -1
            self._on_room(member, has_room)
