"""A preview of a deployment on the cluster as it is now, without deploying. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from controlplane import errors
from controlplane.cluster import reservations
from controlplane.management import requested
from controlplane.management.commands import deploy_model
from controlplane.management.schemas.deploy import DeployModelRequest
from controlplane.planning import lora_ranks, placement_decision, rebalancing, reclaimable_memory
from controlplane.planning.reclaimable_memory import FreeMemory, Place
from controlplane.planning.variant_room import AtOnce, at_once_in
from controlplane.profiling import queue
from controlplane.profiling.calibrations import measurements_of
from controlplane.settings import Settings
from controlplane.state import deployments
from controlplane.state.queries import find_model
from controlplane.state.records import Deployment, Record
from controlplane.state.repository import Put, State
from controlplane.state.transactions import Context
from controlplane.state.worker_groups import WorkerGroup, group_id_of, is_spare
from placement.types import Inventory, Placement


@dataclass(frozen=True)
class Preview:
    """The result of a preview. `running`: `base` is deployed already, or being deployed.

    `placement`: of the first group, None until it is decided. `waits`: the measurement, or the new engines,
    that the deployment would wait for. `at_once`: how many of the base's variants run at once.
    """

    model: str
    base: str
    running: bool
    placement: Placement | None
    waits: str = ""
    at_once: AtOnce | None = None


def preview(
    state: State, inventory: Inventory, settings: Settings, request: DeployModelRequest, ctx: Context
) -> Preview:
    """Preview a deployment. Errors: those of deploying, including NoFeasiblePlan."""
    requested.require_ceilings(request.engine, settings)
    made = [c.record for c in deploy_model(state, request, ctx).changes if isinstance(c, Put)]
    wanted = {record.model: record for record in made if isinstance(record, Deployment)}
    base = wanted[request.model].base
    counted = partial(
        at_once_in, base=find_model(state, base), variants=state.variants_of(base), settings=settings
    )
    if base in state.deployments:
        running = state.deployments[base].record.placement
        begun = new_engines(state, inventory, settings, request.model, made)
        waits = f"waits for a new engine that {begun}" if begun else ""
        return Preview(request.model, base, True, running, waits, counted(running))
    rested = reservations.without_starts(inventory, state, ctx.now_s)
    seen = reclaimable_memory.free_memory(rested, state.ledgers, settings.headroom, exclude=base)
    present = [d.record for d in state.deployments.values()]
    places = _places(state, wanted[base], present, seen, settings)
    victims = sorted({key for place in places for key in place.victims})
    waits = queue.waiting_reason(state, victims) if victims else ""
    first = places[0].placement
    return Preview(request.model, base, False, first, waits, counted(first))


def new_engines(
    state: State, inventory: Inventory, settings: Settings, name: str, changed: Sequence[Record]
) -> str:
    """The purpose of the engines that a variant's deployment, with these changed records, begins to start;
    empty if there are none.

    Errors: NoFeasiblePlan when there is no room for them next to the present engines.
    """
    for record in changed:
        present = state.deployments.get(record.model) if isinstance(record, Deployment) else None
        if present is None or not isinstance(record, Deployment) or _spares(present.record):
            continue
        if spares := _spares(record):
            try:
                require_room_anew(state, inventory, settings, record)
            except errors.NoFeasiblePlan as e:
                variant = find_model(state, name)
                most = lora_ranks.largest_rank(variant, present.record)
                told = lora_ranks.mismatch(variant, record.model, most, e.message)
                raise errors.NoFeasiblePlan(told, details=e.details) from e
            return spares[0].reason
    return ""


def _spares(deployment: Deployment) -> list[WorkerGroup]:
    return [group for group in deployment.groups if is_spare(group, deployment.groups)]


def require_room_anew(state: State, inventory: Inventory, settings: Settings, renewed: Deployment) -> None:
    """Require room for a base's new groups, one for each serving group, in addition to the serving groups.

    Errors: NoFeasiblePlan, ModelNotFound.
    """
    name = renewed.model
    find_model(state, name)
    others = [d.record for d in state.deployments.values() if d.record.model != name]
    seen = reclaimable_memory.free_memory(inventory, state.ledgers, settings.headroom)
    unrelaxed = replace(rebalancing.unrelaxed(renewed), groups=tuple(_spares(renewed)))
    try:
        _places(state, unrelaxed, others, seen, settings)
    except errors.NoFeasiblePlan as e:
        reason = e.message.partition("; ")[0]
        possible = [f"; or {relaxation['text']}" for relaxation in e.details.get("relaxations", ())]
        variants = sorted(d.model for d in others if d.base == name)
        every = ", ".join(f"'{model}'" for model in (*variants, name))
        raise errors.NoFeasiblePlan(
            f"there is no room for new engines of '{name}' while the present engines serve ({reason}); "
            f"undeploy {every} and deploy {'them' if variants else 'it'} again: that interrupts "
            f"{'them' if variants else 'it'}, but takes the memory once{''.join(possible)}",
            details=e.details,
        ) from e


def _places(
    state: State, deployment: Deployment, others: Sequence[Deployment], seen: FreeMemory, settings: Settings
) -> list[Place]:
    """The places of the deployment's groups, placed one after the other (`launch_action`).

    Errors: NoFeasiblePlan when there is no room for all groups.
    """
    places: list[Place] = []
    for group in deployment.groups:
        decide = partial(_decide, state, deployment, others, settings, group.device_kind)
        try:
            place = reclaimable_memory.place(decide, seen)
        except errors.NoFeasiblePlan as e:
            raise _named(e, group_id_of(deployment.base, group.number), len(places)) from e
        seen = seen.less(place.placement)
        places.append(place)
        deployment = deployments.with_group(deployment, replace(group, placement=place.placement))
    return places


def _decide(
    state: State,
    deployment: Deployment,
    others: Sequence[Deployment],
    settings: Settings,
    device_kind: str,
    free: Inventory,
) -> Placement:
    """Decide the placement of one group. Errors: NoFeasiblePlan."""
    base, variants = state.models[deployment.model].record, state.variants_of(deployment.model)
    usable = placement_decision.suited(free, device_kind)
    return placement_decision.decide(
        base,
        deployment,
        usable,
        settings,
        variants,
        measurements_of(state, settings, usable.devices),
        [*others, deployment],
    )


def _named(error: errors.NoFeasiblePlan, group_id: str, placed: int) -> errors.NoFeasiblePlan:
    """The error with the id of the group, if earlier groups have places."""
    if not placed:
        return error
    message = f"'{group_id}' finds no place next to the {placed} placed before it: {error.message}"
    return errors.NoFeasiblePlan(message, details=error.details)
