"""What deploying would do as the cluster is now, without doing it. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

from controlplane import errors
from controlplane.api.commands import deploy_model
from controlplane.api.schemas.deploy import DeployModelRequest
from controlplane.planning import placement_decision, reclaimable_memory
from controlplane.planning.reclaimable_memory import FreeMemory, Place
from controlplane.profiling import queue
from controlplane.settings import Settings
from controlplane.state import deployments
from controlplane.state.records import Deployment, Model
from controlplane.state.repository import Put, State
from controlplane.state.transactions import Context
from controlplane.state.worker_groups import group_id_of
from placement.types import Inventory, Placement


@dataclass(frozen=True)
class Preview:
    """`running` says that `host` is deployed already, or being deployed.

    `placement` is that of the first group, None until it is decided. `waits` names the measuring that the
    deployment would wait for.
    """

    model: str
    host: str
    running: bool
    placement: Placement | None
    waits: str = ""


def preview(
    state: State, inventory: Inventory, settings: Settings, request: DeployModelRequest, ctx: Context
) -> Preview:
    """Errors: those of deploying, NoFeasiblePlan among them."""
    made = [c.record for c in deploy_model(state, request, ctx).changes if isinstance(c, Put)]
    wanted = {record.model: record for record in made if isinstance(record, Deployment)}
    host = wanted[request.model].host
    if host in state.deployments:
        return Preview(request.model, host, True, state.deployments[host].record.placement)
    seen = reclaimable_memory.free_memory(inventory, state.ledgers, settings.headroom, exclude=host)
    places = _places(state, state.models[host].record, wanted[host], seen, settings)
    victims = sorted({key for place in places for key in place.victims})
    waits = queue.waiting_reason(state, victims) if victims else ""
    return Preview(request.model, host, False, places[0].placement, waits)


def _places(
    state: State, base: Model, deployment: Deployment, seen: FreeMemory, settings: Settings
) -> list[Place]:
    """Where its groups would be, one after the other, as they are placed (`launch_action`).

    Errors: NoFeasiblePlan when there is not room for all.
    """
    places: list[Place] = []
    for group in deployment.groups:
        decide = partial(_decide, state, base, deployment, settings)
        try:
            place = reclaimable_memory.place(decide, seen)
        except errors.NoFeasiblePlan as e:
            raise _named(e, group_id_of(deployment.host, group.number), len(places)) from e
        seen = seen.less(place.placement)
        places.append(place)
        deployment = deployments.with_group(deployment, replace(group, placement=place.placement))
    return places


def _decide(
    state: State, base: Model, deployment: Deployment, settings: Settings, free: Inventory
) -> Placement:
    """Errors: NoFeasiblePlan."""
    variants, present = state.variants_of(base.name), [d.record for d in state.deployments.values()]
    return placement_decision.decide(
        base, deployment, free, settings, variants, state.profiles, [*present, deployment]
    )


def _named(error: errors.NoFeasiblePlan, group_id: str, placed: int) -> errors.NoFeasiblePlan:
    """The error with the id of the group, if groups before it have places."""
    if not placed:
        return error
    message = f"'{group_id}' finds no place beside the {placed} before it: {error.message}"
    return errors.NoFeasiblePlan(message, details=error.details)
