"""Whose turn it is to be measured: one profile at a time on a device, the oldest first. Pure.

Who waits holds no memory, so nobody waits in a circle: a profile waits for measurings, which end, and for
engines that wait for measurings themselves.
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
from controlplane.state.records import Model, Phase
from controlplane.state.repository import State
from controlplane.state.worker_groups import GroupPhase
from placement.types import DeviceKey, Inventory, key_of


@dataclass(frozen=True)
class Queued:
    """Not yet; `reason` says for what."""

    reason: str


@dataclass(frozen=True)
class _FreeMemory:
    """What is free `now`, and `later`, when nothing is measured any more."""

    now: Inventory
    later: Inventory


def next_job(state: State, key: str, inventory: Inventory, settings: Settings) -> ProfilingJob | Queued:
    """What is to be measured now for a profile that somebody waits for, or why it waits.

    Errors: ProfilingFailed, when it cannot be measured even once nothing else is.
    """
    if engine := _waiting_engine(state):
        return Queued(f"waits until the engine of '{engine}' has its place")
    seen = _free_memory(state, key, inventory, settings)
    taken = {at: one for at, one in reservations.being_measured(state.ledgers).items() if one != key}
    devices = _candidates(state, key, inventory, settings)
    for older in _before(state, key):
        if devices <= taken.keys():
            break  # of these, whoever is older can take no more
        with suppress(errors.ProfilingFailed):  # with that it ends
            wanted, _ = _choice(state, older, seen, settings, taken)
            taken = dict.fromkeys(wanted.held, older) | taken
    found, others = _choice(state, key, seen, settings, taken)
    return Queued(waiting_reason(state, others)) if others else found


def has_stale_holders(state: State, key: str, inventory: Inventory, settings: Settings) -> bool:
    """Whether what was stopped is still seen with memory of a device that the profile may be measured on."""
    model = progress.subject(state, key)
    if model is None:
        return False
    alike = job.of_kind(state.profiles[key].record, model, inventory, settings)
    return bool(reservations.stale_holders(alike, state.ledgers, reservations.measuring(key)))


def _free_memory(state: State, key: str, inventory: Inventory, settings: Settings) -> _FreeMemory:
    """As if nothing were reserved for `key`. Others that wait have nothing, so it is theirs too."""
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
    """What is best to be measured, and the profiles that have to be measured on its devices before it.

    It goes elsewhere only where just as much can be measured.
    """
    profile, model = state.profiles[key].record, _subject(state, key)
    best = job.profiling_job(profile, model, seen.later, settings)
    others = sorted({taken[at] for at in best.held if at in taken})
    if not others:
        return best, []
    for free in _elsewhere(seen.now, taken):
        with suppress(errors.ProfilingFailed):
            found = job.profiling_job(profile, model, free, settings)
            if found.request.engine_runs == best.request.engine_runs:
                return found, []
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
    """The devices that are not taken: those of nodes that nobody has begun on first, for a mission is of one
    node and may need all of its devices."""
    begun_on = {node for node, _, _ in taken}
    yield replace(inventory, devices=tuple(d for d in inventory.devices if d.node not in begun_on))
    yield replace(inventory, devices=tuple(d for d in inventory.devices if key_of(d) not in taken))


def _before(state: State, key: str) -> list[str]:
    """Profiles that wait as well, and that somebody has waited for longer; the oldest first."""
    asked = _asked(state)
    mine = asked.get(key, math.inf), key
    waiting = (
        (since_s, one)
        for one, since_s in asked.items()
        if (found := state.profiles.get(one)) and found.record.phase is Phase.PENDING
    )
    return [one for since_s, one in sorted(waiting) if (since_s, one) < mine]


def _asked(state: State) -> dict[str, float]:
    """Since when somebody waits for a profile."""
    found: dict[str, float] = {}
    for key, op in progress.awaited(state):
        found[key] = min(op.created_at_s, found.get(key, math.inf))
    return found


def _waiting_engine(state: State) -> str:
    """A base the first engine of which waits for a measuring to end; empty when there is none."""
    return next(
        (
            d.model
            for d in (found.record for found in state.deployments.values())
            if not d.established and d.phase is not Phase.DELETING
            if any(group.refused_on and group.phase is GroupPhase.PENDING for group in d.groups)
        ),
        "",
    )


def waiting_reason(state: State, keys: Iterable[str]) -> str:
    """That these profiles are waited for, by a model of each."""
    names = []
    for key in keys:
        model = progress.subject(state, key)
        names.append(f"the architecture of '{model.name}' ({key})" if model else f"the profile {key}")
    return f"waits until {' and '.join(names)} {'has' if len(names) == 1 else 'have'} been measured"
