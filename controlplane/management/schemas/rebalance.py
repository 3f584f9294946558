"""Bodies of the moves of worker groups."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

from controlplane.management.schemas.common import Strict, View
from controlplane.management.schemas.deploy import DeployModelRequest
from controlplane.management.schemas.placement import MS, RankView

if TYPE_CHECKING:
    from controlplane.planning.rebalancing import RebalanceOutcome
    from placement.rebalancing import Move


class RebalanceRequest(Strict):
    """Make room for the deployment `deploy`; without it for a group that waits, or else free a device.

    With `dryRun` nothing is done.
    """

    dryRun: bool = True
    deploy: DeployModelRequest | None = None


class MoveView(View):
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


class RebalanceView(View):
    """`possible` says whether `moves` reach the goal; there may be none of them. `gain` says what they bring.

    `began` says that they are under way: each new group is started, then the old one is drained and stopped.
    """

    goal: str
    possible: bool
    gain: str
    moves: list[MoveView] = Field(default_factory=list)
    loadBytes: int = 0
    doubledBytes: int = 0
    began: bool = False

    @classmethod
    def of(cls, outcome: RebalanceOutcome, began: bool) -> RebalanceView:
        proposal = outcome.proposal
        if proposal is None:
            why = f": {outcome.refusal}" if outcome.refusal else ""
            return cls(goal=outcome.goal, possible=False, gain=f"no moves of engines can do this{why}")
        return cls(
            goal=outcome.goal,
            possible=True,
            gain=_gain(outcome),
            moves=[MoveView.of(move) for move in proposal.moves],
            loadBytes=proposal.load_bytes,
            doubledBytes=proposal.doubled_bytes,
            began=began,
        )


def _gain(outcome: RebalanceOutcome) -> str:
    proposal = outcome.proposal
    assert proposal is not None
    if proposal.freed is not None:
        device = proposal.freed
        return f"{device.kind}:{device.index} of node {device.node} is free of engines afterwards"
    where = ", ".join(
        sorted({f"{r.device_kind}:{r.device_index} of node {r.node}" for r in proposal.newcomer.ranks})
        if proposal.newcomer
        else ()
    )
    there = "after the moves" if proposal.moves else "now, without any move"
    return f"{outcome.newcomer} fits on {where} {there}"
