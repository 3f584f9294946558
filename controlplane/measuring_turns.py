"""Whose turn it is to be measured: one profile at a time on a device, the oldest first. Pure.

Who waits holds no memory, so nobody waits in a circle: a profile waits for measurings, which end, and for
engines that wait for measurings themselves.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass

from controlplane import errors, ledger, profiling
from controlplane.profiling import Mission
from controlplane.records import Phase
from controlplane.settings import Settings
from controlplane.state.typed import State
from controlplane.worker_groups import GroupPhase
from placement.rebalancing import without
from placement.types import DeviceKey, Inventory


@dataclass(frozen=True)
class Waits:
    """Not yet; `reason` says for what."""

    reason: str


def turn(state: State, key: str, inventory: Inventory, settings: Settings) -> Mission | Waits:
    """What is to be measured now for a profile that somebody waits for, or why it waits.

    Errors: ProfilingFailed, when it cannot be measured even once nothing else is.
    """
    if engine := _waiting_engine(state):
        return Waits(f"waits until the engine of '{engine}' has its place")
    taken = {at: one for at, one in ledger.being_measured(state.ledgers).items() if one != key}
    for older in _before(state, key):
        with suppress(errors.ProfilingFailed):  # with that it ends
            wanted, _ = _wanted(state, older, inventory, settings, taken)
            taken = dict.fromkeys(wanted.held, older) | taken
    found, others = _wanted(state, key, inventory, settings, taken)
    return Waits(until(state, others)) if others else found


def _wanted(
    state: State, key: str, inventory: Inventory, settings: Settings, taken: Mapping[DeviceKey, str]
) -> tuple[Mission, list[str]]:
    """What is to be measured, and the profiles that have to be measured on its devices before it.

    It goes elsewhere only where just as much can be measured.
    """
    profile, model = state.profiles[key].record, profiling.subject(state, key)
    if model is None:
        raise errors.ProfilingFailed(f"no model has the architecture of {key} any more")

    def mission(measured: bool, avoid: Collection[DeviceKey]) -> Mission:
        free = ledger.available(
            inventory, state.ledgers, settings.headroom, besides=ledger.measuring(key), measured=measured
        )
        return profiling.mission(profile, model, without(free, tuple(avoid)), settings)

    best = mission(False, ())
    others = sorted({taken[at] for at in best.held if at in taken})
    if not others:
        return best, []
    try:
        elsewhere = mission(True, taken)
    except errors.ProfilingFailed:
        return best, others
    return (elsewhere, []) if elsewhere.order.trials == best.order.trials else (best, others)


def _before(state: State, key: str) -> list[str]:
    """Profiles that wait as well, and that somebody has waited for longer; the oldest first."""
    asked = {one: _asked(state, one) for one in state.profiles}
    waiting = [one for one in asked if state.profiles[one].record.phase is Phase.PENDING]
    return sorted((one for one in waiting if asked[one] < asked[key]), key=asked.__getitem__)


def _asked(state: State, key: str) -> tuple[float, str]:
    """Since when a profile is asked for; one that is not, last of all."""
    since = [op.created_at_s for op in profiling.waiting(state, key)]
    return (min(since) if since and profiling.subject(state, key) else math.inf), key


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


def until(state: State, keys: Iterable[str]) -> str:
    """That these profiles are waited for, by a model of each."""
    names = []
    for key in keys:
        model = profiling.subject(state, key)
        names.append(f"the architecture of '{model.name}' ({key})" if model else f"the profile {key}")
    return f"waits until {' and '.join(names)} {'has' if len(names) == 1 else 'have'} been measured"
