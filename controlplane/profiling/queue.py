"""Which profile is measured next: one at a time on a device, of each tenant's one before a second of any, and
the oldest first. Pure.

A queued profile reserves no memory, so there is no deadlock: it waits for measurings, which end, and for
engines, which wait for measurings only.
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
    """The profile has to wait; `reason` says for what."""

    reason: str


@dataclass(frozen=True)
class _FreeMemory:
    """What is free `now`, and what is free `later`, when nothing is measured any more."""

    now: Inventory
    later: Inventory


def next_job(state: State, key: str, inventory: Inventory, settings: Settings) -> ProfilingJob | Queued:
    """The job of a profile that somebody waits for, if it may begin now, or why it is queued.

    Errors: ProfilingFailed, when it cannot be measured even once nothing else is.
    """
    if engine := _waiting_engine(state):
        return Queued(f"waits until the engine of '{engine}' has its place")
    seen = _free_memory(state, key, inventory, settings)
    taken = {
        at: measured for at, measured in reservations.being_measured(state.ledgers).items() if measured != key
    }
    devices = _candidates(state, key, inventory, settings)
    for older in _before(state, key):
        if devices <= taken.keys():
            break  # older profiles can take no more of these
        with suppress(errors.ProfilingFailed):  # that profile will fail, and takes nothing
            wanted, _ = _choice(state, older, seen, settings, taken)
            taken = dict.fromkeys(wanted.held, older) | taken
    best, others = _choice(state, key, seen, settings, taken)
    return Queued(waiting_reason(state, others)) if others else best


def has_stale_holders(state: State, key: str, inventory: Inventory, settings: Settings) -> bool:
    """Whether something that was stopped still holds memory of a device for this profile."""
    model = progress.subject(state, key)
    if model is None:
        return False
    alike = job.of_kind(state.profiles[key].record, model, inventory, settings)
    return bool(reservations.stale_holders(alike, state.ledgers, reservations.measuring(key)))


def _free_memory(state: State, key: str, inventory: Inventory, settings: Settings) -> _FreeMemory:
    """The memory that is free for `key`, and for all queued profiles, which have no reservations."""
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
    """The best job of a profile, and the profiles that have to be measured on its devices before it.

    Other devices are chosen only if just as much can be measured there.
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
        raise errors.ProfilingFailed(f"no model has the architecture of {key} any more")
    return model


def _candidates(state: State, key: str, inventory: Inventory, settings: Settings) -> frozenset[DeviceKey]:
    alike = job.of_kind(state.profiles[key].record, _subject(state, key), inventory, settings)
    return frozenset(map(key_of, alike.devices))


def _elsewhere(inventory: Inventory, taken: Collection[DeviceKey]) -> Iterator[Inventory]:
    """The devices that are not taken: first those of nodes where nothing is measured, since a job runs on one
    node and may need all of its devices."""
    begun_on = {node for node, _, _ in taken}
    yield replace(inventory, devices=tuple(d for d in inventory.devices if d.node not in begun_on))
    yield replace(inventory, devices=tuple(d for d in inventory.devices if key_of(d) not in taken))


def _before(state: State, key: str) -> list[str]:
    """Profiles in the queue whose turn is before that of this one, in their order."""
    turn_of = fair_turns.turns(_asked(state))
    mine = turn_of.get(key, (len(turn_of), math.inf, key))
    waiting = (
        turn
        for other, turn in turn_of.items()
        if (profile := state.profiles.get(other)) and profile.record.phase is Phase.PENDING
    )
    return [turn[-1] for turn in sorted(waiting) if turn < mine]


def _asked(state: State) -> Iterator[Asked]:
    """Who waits for which profile."""
    for key, op in progress.awaited(state):
        profile = state.profiles.get(key)
        begun = profile is not None and profile.record.phase is Phase.PROFILING
        yield Asked(op.tenant, key, op.created_at_s, begun)


def _waiting_engine(state: State) -> str:
    """A base the first engine of which waits for a measuring to end; empty when there is none."""
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
    """A sentence saying that these profiles are waited for, each named by a model that has it; but by no
    tenant's, for other tenants may read it."""
    names = []
    for key in keys:
        model = progress.subject(state, key)
        told = model.name if model is not None and not model.tenant else ""
        names.append(f"the architecture of '{told}' ({key})" if told else f"the profile {key}")
    return f"waits until {' and '.join(names)} {'has' if len(names) == 1 else 'have'} been measured"
