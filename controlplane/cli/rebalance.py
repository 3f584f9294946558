"""rebalance."""

from __future__ import annotations

from typing import Annotated

import typer

from controlplane.cli.output import print_json, print_table, print_text, size
from controlplane.cli.session import Json, session
from controlplane.management.schemas.deploy import DeployModelRequest
from controlplane.management.schemas.placement import RankView
from controlplane.management.schemas.rebalance import MoveView, RebalanceRequest
from profiler.figures import figure

COLUMNS = ("GROUP", "FROM", "TO", "READS", "HELD TWICE", "LAST START", "TOKEN")


def rebalance(
    ctx: typer.Context,
    model: Annotated[
        str | None, typer.Argument(metavar="[MODEL]", help="Make room for this registered model.")
    ] = None,
    dry_run: Annotated[bool, typer.Option(help="Show what would be moved, and do nothing.")] = False,
    json: Json = False,
) -> None:
    """Move engines to make room for a waiting model, or to free a device. No request is dropped."""
    cli = session(ctx)
    wanted = None if model is None else DeployModelRequest(model=model)
    with cli.client() as client:
        view = client.rebalance(RebalanceRequest(dryRun=dry_run, deploy=wanted))
    if cli.json:
        print_json({"rebalance": view})
        return
    print_text(f"To {view.goal}: {view.gain}")
    if view.moves:
        print_table(COLUMNS, [_row(move) for move in view.moves], empty="")
        print_text(
            f"the moves read {size(view.loadBytes)}, and hold {size(view.doubledBytes)} of devices twice "
            "meanwhile"
        )
        print_text(
            "the moves have begun; `ostinato status MODEL` shows the progress"
            if view.began
            else "nothing was done"
        )


def _row(move: MoveView) -> tuple[str, ...]:
    start = "not known" if move.startS is None else f"{move.startS:.0f} s"
    return (
        move.group,
        _where(move.ranks),
        _where(move.to),
        size(move.loadBytes),
        size(move.doubledBytes),
        start,
        f"{figure(move.tpotMs)} -> {figure(move.toTpotMs)} ms",
    )


def _where(ranks: list[RankView]) -> str:
    return ", ".join(dict.fromkeys(f"{rank.node} {rank.device}" for rank in ranks))
