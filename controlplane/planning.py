"""What deploying would do as the cluster is now, without doing it. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace

from controlplane import beside_measuring, deploying, errors, measuring_turns, replanning
from controlplane.api.deploy_requests import DeployModelRequest
from controlplane.commands import Context, deploy_model
from controlplane.records import Deployment, Model
from controlplane.settings import Settings
from controlplane.state.typed import Put, State
from controlplane.worker_groups import group_id
from placement.rebalancing import less
from placement.types import Inventory, Placement


@dataclass(frozen=True)
class Preview:
    """`running`: `host` is deployed, or being so; its `placement` is None until that is decided. Of
    several groups it is the first one's. `waits` says for which measuring deploying would wait."""

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
    base, deployment = state.models[host].record, wanted[host]
    seen = beside_measuring.sight(inventory, state.ledgers, settings.headroom, besides=host)
    found = beside_measuring.find(lambda free: _first(state, base, deployment, free, settings), seen)
    waits = measuring_turns.until(state, found.in_the_way) if found.in_the_way else ""
    return Preview(request.model, host, False, found.placement, waits)


def _first(
    state: State, base: Model, deployment: Deployment, free: Inventory, settings: Settings
) -> Placement:
    """Where the first of its groups would be, if there is room for all.

    Errors: NoFeasiblePlan.
    """
    variants = state.variants_of(base.name)
    present = [d.record for d in state.deployments.values()]
    places: list[Placement] = []
    for number, group in enumerate(deployment.groups):
        try:
            placed = deploying.decide(
                base, deployment, free, settings, variants, state.profiles, [*present, deployment]
            )
        except errors.NoFeasiblePlan as e:
            raise _named(e, group_id(deployment.host, group.number), number) from e
        free = less(free, [placed])
        places.append(placed)
        deployment = replanning.with_group(deployment, replace(group, placement=placed))
    return places[0]


def _named(error: errors.NoFeasiblePlan, group: str, placed: int) -> errors.NoFeasiblePlan:
    """With the name of the group, if others found their places."""
    if not placed:
        return error
    told = f"'{group}' finds no place beside the {placed} before it: {error.message}"
    return errors.NoFeasiblePlan(told, details=error.details)
