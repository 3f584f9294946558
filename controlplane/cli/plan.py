"""plan: the placement of deployments from a file, computed by this process; nothing is deployed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from controlplane import errors
from controlplane.baselines.placement.registry import PolicyName
from controlplane.cli.output import print_json, print_table, print_text
from controlplane.cli.session import Json, session
from profiler.figures import figure

if TYPE_CHECKING:
    from placement.solver.cluster import Gpu
    from placement.solver.outcome import NotPlaced
    from placement.solver.request import Request
    from placement.solver.whatif import WhatIf
    from placement.types import Placement, RankPlacement

GIB = 2**30


def plan(
    ctx: typer.Context,
    file: Annotated[Path, typer.Argument(help="A cluster and deployments, as YAML (docs/placement.md).")],
    *,
    policy: Annotated[
        PolicyName, typer.Option(help="Ostinato's policy, or a policy of MaverIQ's paper.")
    ] = PolicyName.OSTINATO,
    theta: Annotated[
        float, typer.Option(min=0, max=1, help="The threshold of MaverIQ's hybrid policy.")
    ] = 0.7,
    plot: Annotated[Path | None, typer.Option(help="Write a picture of the cluster to this PNG.")] = None,
    json: Json = False,
) -> None:
    """Place deployments on a described cluster, in order. Show the placements and what does not fit."""
    cli = session(ctx)
    outcome = _solved(file, policy, theta)
    if plot is not None:
        from controlplane.cli.cluster_picture import draw

        draw(outcome, plot)
    if cli.json:
        print_json(_camel_case(_document(outcome)))
        return
    print_table(
        PLACED, (_placed(request, placement) for request, placement in outcome.placed), "nothing fits"
    )
    for request, placement in outcome.placed:
        if placement.choice.sizes:
            print_text(f"{request.name}: {placement.choice.sizes}")
    print_text("")
    print_table(GPUS, _gpus(outcome), "no GPUs")
    for missed in outcome.not_placed:
        print_text(f"\n{missed.deployment} does not fit: {missed.reason}")
        for relaxation in missed.relaxations:
            print_text(f"  {relaxation.text}")


PLACED = (
    "DEPLOYMENT",
    "QUANTIZATION",
    "TP",
    "LAYERS",
    "LATENCY",
    "TTFT",
    "TPOT",
    "AT MOST",
    "OBJECTIVE",
    "GPUS",
)
GPUS = ("NODE", "GPU", "TYPE", "USED", "FREE", "LOAD", "LAYERS")


def _solved(file: Path, policy: PolicyName, theta: float) -> WhatIf:
    from controlplane.baselines.placement import registry
    from controlplane.planning.what_if import what_if
    from controlplane.settings import Settings
    from placement.solver import scenario_file, schema

    try:
        form = schema.read_form(scenario_file.read(file))
        return what_if(form, file.parent, Settings(), registry.policy(policy, theta))
    except schema.ScenarioError as error:
        raise errors.InvalidRequest(f"{file}: {error}; see docs/placement.md", param="file") from error


def _placed(request: Request, placement: Placement) -> tuple[str, ...]:
    plan, estimate, choice = placement.plan, placement.estimate, placement.choice
    return (
        request.name,
        plan.quantization,
        str(plan.tensor_parallel),
        "+".join(map(str, plan.layers_per_stage)),
        f"{figure(choice.latency_s)} s",
        f"{figure(estimate.ttft_s * 1e3)} ms",
        f"{figure(estimate.tpot_s * 1e3)} ms",
        f"{figure(choice.throughput_per_s)}/s",
        f"{figure(choice.objective, 4)} {choice.unit}",
        " ".join(f"{rank.node}:{rank.device_index}" for rank in placement.ranks),
    )


def _gpus(outcome: WhatIf) -> Iterator[tuple[str, ...]]:
    for node in outcome.cluster.nodes:
        for gpu in node.gpus:
            held = (f"{r.deployment}[{r.layer_start}:{r.layer_end}]" for r in gpu.residents)
            used = (gpu.total_bytes - gpu.free_bytes) / GIB
            amounts = (f"{used:.2f}", f"{gpu.free_bytes / GIB:.2f}", f"{gpu.load:.2f}")
            yield (node.name, str(gpu.index), gpu.type, *amounts, " ".join(held))


def _camel_case(value: Any) -> Any:
    """The same document with its keys in the API's spelling."""
    if isinstance(value, dict):
        return {_camel(key): _camel_case(entry) for key, entry in value.items()}
    return [_camel_case(entry) for entry in value] if isinstance(value, list | tuple) else value


def _camel(name: str) -> str:
    first, *rest = name.split("_")
    return first + "".join(word.capitalize() for word in rest)


def _document(outcome: WhatIf) -> dict[str, Any]:
    return {
        "policy": outcome.policy,
        "placed": [_placed_document(request, placement) for request, placement in outcome.placed],
        "not_placed": [_missed_document(missed) for missed in outcome.not_placed],
        "gpus": [_gpu_document(node.name, gpu) for node in outcome.cluster.nodes for gpu in node.gpus],
    }


def _gpu_document(node: str, gpu: Gpu) -> dict[str, Any]:
    document = {"node": node, **asdict(gpu)}
    document["island"] = document.pop("nvlink_domain")  # the API's name
    return document


def _placed_document(request: Request, placement: Placement) -> dict[str, Any]:
    plan, estimate, choice = placement.plan, placement.estimate, placement.choice
    return {
        "deployment": request.name,
        "compression": plan.quantization,
        "tensor_parallel": plan.tensor_parallel,
        "layers_per_stage": plan.layers_per_stage,
        "objective": choice.objective,
        "unit": choice.unit,
        "figures": {
            "ttft_s": estimate.ttft_s,
            "tpot_s": estimate.tpot_s,
            "latency_s": choice.latency_s,
            "throughput_per_s": choice.throughput_per_s,
            "memory_bytes": [rank.memory_bytes for rank in placement.ranks if rank.tp_rank == 0],
            "utilisation": choice.utilisation,
        },
        "ranks": [_rank_document(rank) for rank in placement.ranks],
        "reasons": choice.reasons,
        "sizes": _sizes_document(placement) if choice.sizes else None,
    }


def _sizes_document(placement: Placement) -> dict[str, Any]:
    from placement.types import sizes_of

    return {**asdict(sizes_of(placement.plan)), "why": placement.choice.sizes}


def _rank_document(rank: RankPlacement) -> dict[str, Any]:
    document = asdict(rank)
    document["gpu"] = document.pop("device_index")
    return document


def _missed_document(missed: NotPlaced) -> dict[str, Any]:
    return {
        "deployment": missed.deployment,
        "binding": missed.binding,
        "reason": missed.reason,
        "together": missed.together,
        "relaxations": [asdict(relaxation) for relaxation in missed.relaxations],
    }
