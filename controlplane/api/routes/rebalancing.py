"""Moves of worker groups over REST: what is proposed, and begun unless it is a dry run."""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import APIRouter

from controlplane.api.services import Services, fresh_context
from controlplane.management import requested
from controlplane.management.commands import deploy_model
from controlplane.management.schemas.deploy import DeployModelRequest
from controlplane.management.schemas.rebalance import RebalanceRequest, RebalanceView
from controlplane.planning import rebalancing
from controlplane.state.records import Deployment
from controlplane.state.repository import Put, State
from controlplane.state.transactions import persist
from placement.types import Inventory


def router(services: Services) -> APIRouter:
    routes = APIRouter(tags=["cluster"])

    @routes.post("/rebalance")
    async def rebalance(body: RebalanceRequest) -> RebalanceView:
        """Moves that make room or free a device, with their cost; they begin unless it is a dry run."""
        inventory = await services.cluster.inventory()
        return await asyncio.to_thread(persist, lambda: _once(services, inventory, body))

    return routes


def _once(services: Services, inventory: Inventory, body: RebalanceRequest) -> RebalanceView:
    """Errors: NotReady, those of deploying; StaleWrite when the records changed meanwhile."""
    state = services.repository.read()
    if body.deploy is not None:
        requested.require_ceilings(body.deploy.engine, services.settings)
    newcomer = None if body.deploy is None else _wanted(state, body.deploy)
    if body.deploy and newcomer and newcomer.model in state.deployments:
        gain = f"the engine of '{newcomer.model}' serves it already"
        return RebalanceView(goal=f"make room for {body.deploy.model}", possible=True, gain=gain)
    outcome = rebalancing.propose(state, inventory, services.settings, newcomer)
    began = not body.dryRun and outcome.proposal is not None and bool(outcome.proposal.moves)
    if began and outcome.proposal is not None:
        services.repository.commit(rebalancing.begun(state, outcome.proposal))
    return RebalanceView.of(outcome, began)


def _wanted(state: State, request: DeployModelRequest) -> Deployment:
    """The deployment of the base that would serve this: the one to be made, or the one that is there."""
    changes: list[Any] = [
        c.record for c in deploy_model(state, request, fresh_context()).changes if isinstance(c, Put)
    ]
    made = {record.model: record for record in changes if isinstance(record, Deployment)}
    return made[made[request.model].base]
