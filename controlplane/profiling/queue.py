"""The queue of profiles: one at a time on a device, one of each tenant before a second one of any, oldest
first. Pure.

A queued profile reserves no memory, so there is no deadlock. It waits for measurements, which end, and for
engines, which wait for measurements only.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace

from controlplane import errors
from controlplane.cluster import reservations
from controlplane.profiling import job, progress
from controlplane.profiling.job import ProfilingJob
from controlplane.settings import Settings
from controlplane.state import fair_turns
from controlplane.state.fair_turns import Asked
from controlplane.state.records import Model, Phase
from controlplane.state.repository import State
from controlplane.state.worker_groups import GroupPhase
from placement.types import DeviceKey, Inventory, key_of


@dataclass(frozen=True)
class Queued:
    """A profile that has to wait; `reason` says what it waits for."""

    reason: str


@dataclass(frozen=True)
class _FreeMemory:
    """The free memory `now`, and `later`, when no measurements run."""

    now: Inventory
    later: Inventory


def next_job(state: State, key: str, inventory: Inventory, settings: Settings) -> ProfilingJob | Queued:
    """The job of a profile that an operation waits for, if it may begin now, or why it is queued.

    Errors: ProfilingFailed, when it cannot be measured even without any other measurement.
    """
    if engine := _waiting_engine(state):
        return Queued(f"waits until the engine of '{engine}' is placed")
    seen = _free_memory(state, key, inventory, settings)
    taken = {
        at: measured for at, measured in reservations.being_measured(state.ledgers).items() if measured != key
    }
    devices = _candidates(state, key, inventory, settings)
    for older in _before(state, key):
        if devices <= taken.keys():
            break  # older profiles cannot take further devices of these
        with suppress(errors.ProfilingFailed):  # that profile will fail, and needs no device
            wanted, _ = _choice(state, older, seen, settings, taken)
            taken = dict.fromkeys(wanted.held, older) | taken
    best, others = _choice(state, key, seen, settings, taken)
    return Queued(waiting_reason(state, others)) if others else best


def has_stale_holders(state: State, key: str, inventory: Inventory, settings: Settings) -> bool:
    """Tell whether a stopped holder still has memory of a device for this profile."""
    model = progress.subject(state, key)
    if model is None:
        return False
    alike = job.of_kind(state.profiles[key].record, model, inventory, settings)
    return bool(reservations.stale_holders(alike, state.ledgers, reservations.measuring(key)))


def _free_memory(state: State, key: str, inventory: Inventory, settings: Settings) -> _FreeMemory:
    """The free memory for `key`, and for all queued profiles, which have no reservations."""
    now, later = (
        reservations.available(
            inventory,
            state.ledgers,
            settings.headroom,
            exclude=reservations.measuring(key),
            measured=measured,
        )
        for measured in (True, False)
    )
    return _FreeMemory(now, later)


def _choice(
    state: State, key: str, seen: _FreeMemory, settings: Settings, taken: Mapping[DeviceKey, str]
) -> tuple[ProfilingJob, list[str]]:
    """The best job of a profile, and the profiles that must be measured on its devices before it.

    Other devices are chosen only if they allow the same measurements.
    """
    profile, model = state.profiles[key].record, _subject(state, key)
    best = job.profiling_job(profile, model, seen.later, settings)
    others = sorted({taken[at] for at in best.held if at in taken})
    if not others:
        return best, []
    for free in _elsewhere(seen.now, taken):
        with suppress(errors.ProfilingFailed):
            candidate = job.profiling_job(profile, model, free, settings)
            if candidate.request.engine_runs == best.request.engine_runs:
                return candidate, []
    return best, others


def _subject(state: State, key: str) -> Model:
    model = progress.subject(state, key)
    if model is None:
        raise errors.ProfilingFailed(f"no registered model has the architecture of {key}")
    return model


def _candidates(state: State, key: str, inventory: Inventory, settings: Settings) -> frozenset[DeviceKey]:
    alike = job.of_kind(state.profiles[key].record, _subject(state, key), inventory, settings)
    return frozenset(map(key_of, alike.devices))


def _elsewhere(inventory: Inventory, taken: Collection[DeviceKey]) -> Iterator[Inventory]:
    """The free devices: first those of nodes without a measurement, since a job runs on one node and may
    need all of its devices."""
    begun_on = {node for node, _, _ in taken}
    yield replace(inventory, devices=tuple(d for d in inventory.devices if d.node not in begun_on))
    yield replace(inventory, devices=tuple(d for d in inventory.devices if key_of(d) not in taken))


def _before(state: State, key: str) -> list[str]:
    """The queued profiles with an earlier turn than this one, in their order."""
    turn_of = fair_turns.turns(_asked(state))
    mine = turn_of.get(key, fair_turns.Turn(len(turn_of), math.inf, key))
    waiting = (
        turn
        for other, turn in turn_of.items()
        if (profile := state.profiles.get(other)) and profile.record.phase is Phase.PENDING
    )
    return [turn.what for turn in sorted(waiting) if turn < mine]


def _asked(state: State) -> Iterator[Asked]:
    """The operations that wait for profiles."""
    for key, op in progress.awaited(state):
        profile = state.profiles.get(key)
        begun = profile is not None and profile.record.phase is Phase.PROFILING
        yield Asked(op.tenant, key, op.created_at_s, begun)


def _waiting_engine(state: State) -> str:
    """A base whose first engine waits for a measurement to end; empty when there is none."""
    return next(
        (
            d.model
            for d in (versioned.record for versioned in state.deployments.values())
            if not d.established and d.phase is not Phase.DELETING
            if any(group.refused_on and group.phase is GroupPhase.PENDING for group in d.groups)
        ),
        "",
    )


def waiting_reason(state: State, keys: Iterable[str]) -> str:
    """A sentence that names the profiles that are waited for, each by one of its models. A tenant's model
    is not named, because other tenants may read the sentence."""
    names = []
    for key in keys:
        model = progress.subject(state, key)
        told = model.name if model is not None and not model.tenant else ""
        names.append(f"the architecture of '{told}' ({key})" if told else f"the profile {key}")
    return f"waits until {' and '.join(names)} {'has' if len(names) == 1 else 'have'} been measured"
