"""What deploying would do as the cluster is now, without doing it. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from controlplane import deploying, ledger
from controlplane.api.deploy_requests import DeployModelRequest
from controlplane.commands import Context, deploy_model
from controlplane.records import Deployment
from controlplane.settings import Settings
from controlplane.state.typed import Put, State
from placement.types import Inventory, Placement


@dataclass(frozen=True)
class Preview:
    """`running`: `host` is deployed, or being so; its `placement` is None until that is decided."""

    model: str
    host: str
    running: bool
    placement: Placement | None


def preview(
    state: State, inventory: Inventory, settings: Settings, request: DeployModelRequest, ctx: Context
) -> Preview:
    """Errors: those of deploying, NoFeasiblePlan among them."""
    made = [c.record for c in deploy_model(state, request, ctx).changes if isinstance(c, Put)]
    wanted = {record.model: record for record in made if isinstance(record, Deployment)}
    host = wanted[request.model].host
    if host in state.deployments:
        return Preview(request.model, host, True, state.deployments[host].record.placement)
    base = state.models[host].record
    variants = state.variants_of(host)
    others = [d.record for d in state.deployments.values()]
    free = ledger.available(inventory, state.ledgers, settings.headroom, besides=host)
    placement = deploying.decide(base, wanted[host], free, settings, variants, state.profiles, others)
    return Preview(request.model, host, False, placement)
