"""profile, estimate."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from controlplane.cli.deployment_facts import variants_at_once
from controlplane.cli.failures import require_success
from controlplane.cli.output import (
    print_facts,
    print_json,
    print_table,
    print_text,
    quantization_suffix,
    size,
)
from controlplane.cli.session import Json, NoWait, session
from controlplane.cli.waiting import follow
from controlplane.management.schemas.common import IntervalView
from controlplane.management.schemas.estimates import (
    EstimateRequest,
    EstimateView,
    PlansRequest,
    ProfileView,
    RankCostView,
)
from controlplane.state.terms import EXPECTED_INPUT_TOKENS as INPUT_TOKENS
from controlplane.state.terms import EXPECTED_OUTPUT_TOKENS as OUTPUT_TOKENS

Name = Annotated[str, typer.Argument(help="A registered model.")]


def profile(
    ctx: typer.Context,
    model: Name,
    *,
    show: Annotated[
        bool, typer.Option("--show", help="Only show the present profile; measure nothing.")
    ] = False,
    again: Annotated[
        bool, typer.Option("--again", help="Measure everything again, including the request path.")
    ] = False,
    no_wait: NoWait = False,
    json: Json = False,
) -> None:
    """Measure what a model's profile lacks on the cluster's devices, and show the profile."""
    cli = session(ctx)
    if show and (again or no_wait):
        raise typer.BadParameter("--show measures nothing: leave out --again and --no-wait")
    with cli.client() as client:
        operation = None if show else client.profile_model(model, again)
        if operation is not None and no_wait:
            print_json({"operation": operation}) if cli.json else print_text(operation.id)
            return
        if operation is not None:
            operation = follow(client, operation, quiet=cli.json)
        view = client.profile(model)
    if cli.json:
        print_json({"operation": operation, "profile": view})
    if operation is not None:
        require_success(operation)
    if not cli.json:
        _print_profile(view)


def _print_profile(view: ProfileView) -> None:
    took = f"{len(view.loads)} of {view.plannedLoads} in {view.seconds:.0f} s"
    print_facts(
        [
            ("Model", view.model),
            ("Profile", view.phase or "none"),
            ("Architecture", view.architecture or ""),
            ("On", f"{view.device}, {view.dtype}, vLLM {view.engineVersion}" if view.device else ""),
            ("Loads", took if view.loads else ""),
            ("State", view.reason),
        ]
    )
    rows = [
        (
            f"{load.tensorParallel} x {'+'.join(map(str, load.layersPerStage))}"
            + quantization_suffix(load.quantization),
            str(load.batch),
            str(load.inputTokens),
            str(load.outputTokens),
            ", ".join(load.variants),
            f"{load.ttftMs:.1f} ms",
            f"{load.tpotMs:.2f} ms",
        )
        for load in view.loads
    ]
    if rows:
        print_table(("TP x LAYERS", "BATCH", "INPUT", "OUTPUT", "VARIANTS", "TTFT", "TPOT"), rows, empty="")


def estimate(  # noqa: PLR0913 - typer reads a command's options from its parameters
    ctx: typer.Context,
    model: Name,
    *,
    tp: Annotated[int, typer.Option(help="Ranks that share each layer (tensor parallelism).")] = 1,
    pp: Annotated[int | None, typer.Option(help="Pipeline stages, split evenly.")] = None,
    layers: Annotated[
        str | None, typer.Option(metavar="N,N,...", help="Layers of each stage, instead of --pp: 10,22.")
    ] = None,
    quantization: Annotated[str, typer.Option(help="Quantization of the weights.")] = "none",
    batch: Annotated[int, typer.Option(help="Requests at once.")] = 1,
    input_tokens: Annotated[int, typer.Option("--input", help="Tokens of each prompt.")] = INPUT_TOKENS,
    output_tokens: Annotated[int, typer.Option("--output", help="Tokens of each answer.")] = OUTPUT_TOKENS,
    variants: Annotated[
        str | None,
        typer.Option(
            metavar="NAME,...",
            help="Variants that the batch's requests ask in turn; name the base to include it.",
        ),
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE.png", help="Draw every plan's latency, cost and memory.")
    ] = None,
    devices: Annotated[
        int | None,
        typer.Option(
            help="Assume this number of devices like the cluster's, one per rank. Default: the real devices."
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Estimate a plan of a model under a load: latency, throughput, cost and memory, with intervals."""
    cli = session(ctx)
    load = {
        "batch": batch,
        "inputTokens": input_tokens,
        "outputTokens": output_tokens,
        "variants": _names(variants),
        "devices": devices,
    }
    shape = {"tensorParallel": tp, "pipelineParallel": pp, "layersPerStage": _layers(layers)}
    with cli.client() as client:
        view = client.estimate(
            model, EstimateRequest.model_validate({**load, **shape, "quantization": quantization})
        )
        plans = client.plans(model, PlansRequest.model_validate(load)) if plot else None
    if plot is not None and plans is not None:
        from controlplane.cli.plotting import draw

        draw(plans, view, plot)
    if cli.json:
        print_json({"estimate": view, **({} if plans is None else {"plans": plans, "plot": str(plot)})})
        return
    _print_estimate(view)
    if plans is not None:
        _print_plans(plans)
        print_text(f"drawn in {plot}")


def _layers(text: str | None) -> list[int] | None:
    if text is None:
        return None
    try:
        return [int(part) for part in text.split(",")]
    except ValueError as e:
        raise typer.BadParameter(
            f"expected numbers of layers such as 10,22, got {text!r}", param_hint="--layers"
        ) from e


def _names(text: str | None) -> list[str]:
    return [part.strip() for part in (text or "").split(",") if part.strip()]


def _print_estimate(e: EstimateView) -> None:
    print_facts(_facts(e))
    print_table(
        ("RANK", "LAYERS", "WEIGHTS", "KV CACHE", "VARIANTS", "REST", "TOTAL", "BETWEEN"),
        [_rank_row(rank) for rank in e.ranks],
        empty="",
    )


def _facts(e: EstimateView) -> Iterator[tuple[str, str]]:
    in_turn = f", asking {', '.join(e.variants)} in turn" if e.variants else ""
    yield "Model", e.model
    yield "Plan", f"{_split(e)}, quantization {e.quantization}"
    yield "Load", f"{e.batch} at once, {e.inputTokens} tokens in, {e.outputTokens} out{in_turn}"
    yield "Basis", {"profile": "measured on this kind of device", "rough": "rough: not measured"}[e.basis]
    yield "TTFT", _milliseconds(e.ttftMs)
    if e.engineTtftMs is not None and e.pathMs is not None:
        yield (
            "of TTFT",
            f"the request path {_milliseconds(e.pathMs)}, engine {_milliseconds(e.engineTtftMs)}",
        )
    yield "TPOT", _milliseconds(e.tpotMs)
    yield "Latency", _milliseconds(e.latencyMs)
    yield "Throughput", f"{_span(e.tokensPerSecond)} tokens/s"
    yield "Cost", f"{_number(e.costGibS)} GiB-seconds"
    if e.variantLoad is not None:
        v = e.variantLoad
        ranks = f"ranks add up to {v.rankSum}, the largest is {v.rankMax}" if v.rankMax else "no LoRA ranks"
        yield "Variants", f"in {v.requests} of {e.batch} requests; {ranks}"
    if at_once := variants_at_once(e.variantsAtOnce):
        yield "Variants at once", at_once
    if e.kvCapacityTokens is not None:
        yield (
            "KV cache",
            f"room for {e.kvCapacityTokens} tokens; an engine runs {e.concurrency} such requests at once",
        )
    for note in e.notes:
        yield "Note", note


def _split(e: EstimateView) -> str:
    return f"tensor parallel {e.tensorParallel}, layers {'+'.join(map(str, e.layersPerStage))}"


def _milliseconds(interval: IntervalView) -> str:
    return f"{_span(interval)} ms"


def _span(i: IntervalView) -> str:
    return f"{_number(i.value)} ({_number(i.low)} to {_number(i.high)})"


def _number(value: float) -> str:
    """Three or four digits, never an exponent."""
    return f"{value:.0f}" if value >= 1000 else f"{value:.4g}"


def _rank_row(r: RankCostView) -> tuple[str, ...]:
    rest = r.activationBytes + r.graphBytes + r.runtimeBytes
    parts = (r.weightBytes, r.kvCacheBytes, r.variantBytes, rest, round(r.totalBytes.value))
    between = f"{size(round(r.totalBytes.low))} to {size(round(r.totalBytes.high))}"
    return (str(r.rank), str(r.layers), *map(size, parts), between)


def _print_plans(plans: list[EstimateView]) -> None:
    rows = [
        (
            _split(p) + quantization_suffix(p.quantization),
            f"{_number(p.latencyMs.value)} ms",
            _number(p.costGibS),
            size(round(p.memoryBytes)),
            "best of its kind" if p.pareto else "",
        )
        for p in plans
    ]
    print_table(("PLAN", "LATENCY", "COST (GiB s)", "MEMORY", "PARETO"), rows, empty="no plan")
