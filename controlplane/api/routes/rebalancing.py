"""Moves of worker groups over REST: what is proposed, and begun unless it is a dry run."""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import APIRouter
from pydantic import BaseModel, Field

from controlplane.api.commands import deploy_model
from controlplane.api.schemas.common import Strict
from controlplane.api.schemas.deploy import DeployModelRequest
from controlplane.api.schemas.placement import MS, RankView
from controlplane.api.services import Services, fresh_context
from controlplane.controller.transitions import persist
from controlplane.planning import rebalancing
from controlplane.planning.rebalancing import Asked
from controlplane.state.records import Deployment
from controlplane.state.repository import Put, State
from placement.rebalancing import Move
from placement.types import Inventory


class RebalanceRequest(Strict):
    """`deploy` is a deployment to make room for; without it a group that found no place, or else a device is
    to be freed. With `dryRun` nothing is done."""

    dryRun: bool = True
    deploy: DeployModelRequest | None = None


class MoveView(BaseModel):
    """One group's move. `loadBytes` are read again; `doubledBytes` of devices are held twice until the old
    engine is stopped, `startS` seconds if it starts as it did the last time (null: not known), and until the
    requests that the old one has are answered. A token is estimated to take `tpotMs` now, then `toTpotMs`."""

    group: str
    ranks: list[RankView]
    to: list[RankView]
    loadBytes: int
    doubledBytes: int
    startS: float | None
    tpotMs: float
    toTpotMs: float

    @classmethod
    def of(cls, move: Move) -> MoveView:
        old = move.tenant.placement
        return cls(
            group=move.tenant.name,
            ranks=[RankView.of(rank) for rank in old.ranks],
            to=[RankView.of(rank) for rank in move.placement.ranks],
            loadBytes=move.tenant.load_bytes,
            doubledBytes=sum(rank.memory_bytes for rank in old.ranks),
            startS=move.tenant.start_s or None,
            tpotMs=old.estimate.tpot_s * MS,
            toTpotMs=move.placement.estimate.tpot_s * MS,
        )


class RebalanceView(BaseModel):
    """`possible` is whether the goal is reached by `moves`, of which there may be none; `gain` says what by.

    `began`: they are under way. Each new group is started, and then the old one is drained and stopped."""

    goal: str
    possible: bool
    gain: str
    moves: list[MoveView] = Field(default_factory=list)
    loadBytes: int = 0
    doubledBytes: int = 0
    began: bool = False

    @classmethod
    def of(cls, asked: Asked, began: bool) -> RebalanceView:
        found = asked.proposal
        if found is None:
            why = f": {asked.refusal}" if asked.refusal else ""
            return cls(goal=asked.goal, possible=False, gain=f"no moves do that{why}")
        return cls(
            goal=asked.goal,
            possible=True,
            gain=_gain(asked),
            moves=[MoveView.of(move) for move in found.moves],
            loadBytes=found.load_bytes,
            doubledBytes=found.doubled_bytes,
            began=began,
        )


def router(services: Services) -> APIRouter:
    routes = APIRouter(tags=["cluster"])

    @routes.post("/rebalance")
    async def rebalance(body: RebalanceRequest) -> RebalanceView:
        """Moves that make room or free a device, with their cost; they begin unless it is a dry run."""
        inventory = await services.engines.inventory()
        return await asyncio.to_thread(persist, lambda: _once(services, inventory, body))

    return routes


def _once(services: Services, inventory: Inventory, body: RebalanceRequest) -> RebalanceView:
    """Errors: NotReady, those of deploying; StaleWrite when the records changed meanwhile."""
    state = services.repository.read()
    newcomer = None if body.deploy is None else _wanted(state, body.deploy)
    if body.deploy and newcomer and newcomer.model in state.deployments:
        gain = f"the engine of '{newcomer.model}' serves it already"
        return RebalanceView(goal=f"make room for {body.deploy.model}", possible=True, gain=gain)
    asked = rebalancing.propose(state, inventory, services.settings, newcomer)
    began = not body.dryRun and asked.proposal is not None and bool(asked.proposal.moves)
    if began and asked.proposal is not None:
        services.repository.commit(rebalancing.begun(state, asked.proposal))
    return RebalanceView.of(asked, began)


def _wanted(state: State, request: DeployModelRequest) -> Deployment:
    """The deployment of the base that would serve this: the one to be made, or the one that is there."""
    changes: list[Any] = [
        c.record for c in deploy_model(state, request, fresh_context()).changes if isinstance(c, Put)
    ]
    made = {one.model: one for one in changes if isinstance(one, Deployment)}
    return made[made[request.model].host]


def _gain(asked: Asked) -> str:
    found = asked.proposal
    assert found is not None
    if found.freed is not None:
        device = found.freed
        return f"{device.kind}:{device.index} of node {device.node} has nothing of ours on it afterwards"
    where = ", ".join(
        sorted({f"{r.device_kind}:{r.device_index} of node {r.node}" for r in found.newcomer.ranks})
        if found.newcomer
        else ()
    )
    there = "afterwards" if found.moves else "now, without any move"
    return f"{asked.newcomer} fits on {where} {there}"
