"""deploy, undeploy, logs."""

from __future__ import annotations

from contextlib import suppress
from enum import StrEnum
from typing import Annotated

import typer

from controlplane.api.schemas import DeploymentView, DeployModelRequest, PlanView, RankView, SloLimits
from controlplane.cli.failures import require_success
from controlplane.cli.output import print_facts, print_json, print_text, size
from controlplane.cli.session import Json, NoWait, session
from controlplane.cli.waiting import follow
from controlplane.client import Client
from controlplane.errors import ModelNotFound

Name = Annotated[str, typer.Argument(help="A model.")]


class IntentOption(StrEnum):
    MIN_COST = "minCost"
    MIN_LAT = "minLat"
    LAT_SLO = "latSLO"
    COST_SLO = "costSLO"
    ACC_SLO = "accSLO"


def deploy(  # noqa: PLR0913 - typer reads a command's options from its parameters
    ctx: typer.Context,
    model: Name,
    *,
    intent: Annotated[IntentOption, typer.Option(help="What to optimise, or which limit to meet.")] = (
        IntentOption.MIN_COST
    ),
    max_output: Annotated[int, typer.Option(min=1, help="Longest answer, in tokens.")] = 256,
    e2e_ms: Annotated[float | None, typer.Option(help="Limit for a whole answer (latSLO).")] = None,
    ttft_ms: Annotated[float | None, typer.Option(help="Limit to the first token (latSLO).")] = None,
    tpot_ms: Annotated[float | None, typer.Option(help="Limit per further token (latSLO).")] = None,
    cost: Annotated[float | None, typer.Option(help="Limit in GiB-seconds a request (costSLO).")] = None,
    accuracy: Annotated[float | None, typer.Option(help="Least accuracy in percent (accSLO).")] = None,
    no_wait: NoWait = False,
    json: Json = False,
) -> None:
    """Deploy a registered model; Ostinato chooses how and where by the intent."""
    cli = session(ctx)
    limits = SloLimits(e2e_ms=e2e_ms, ttft_ms=ttft_ms, tpot_ms=tpot_ms, cost_gib_s=cost, accuracy=accuracy)
    request = DeployModelRequest.model_validate(
        {"model": model, "maxOutputLength": max_output, "intent": intent.value, "SLOs": limits}
    )
    with cli.client() as client:
        operation = client.deploy_model(request)
        if no_wait:
            print_json({"operation": operation}) if cli.json else print_text(operation.id)
            return
        operation = follow(client, operation, quiet=cli.json)
        deployment = _find(client, model)
    if cli.json:
        print_json({"operation": operation, "deployment": deployment})
    require_success(operation)
    if not cli.json:
        print_text(f"'{model}' is {operation.phase}; try `ostinato chat {model}`")
        print_facts([] if deployment is None else deployment_facts(deployment))


def undeploy(ctx: typer.Context, model: Name, no_wait: NoWait = False, json: Json = False) -> None:
    """Stop serving a model; it stays registered."""
    cli = session(ctx)
    with cli.client() as client:
        operation = client.undeploy(model)
        if not no_wait:
            operation = follow(client, operation, quiet=cli.json)
    if cli.json:
        print_json({"operation": operation})
    require_success(operation)
    if not cli.json:
        print_text(operation.id if no_wait else f"'{model}' is no longer deployed")


def logs(
    ctx: typer.Context,
    model: Name,
    lines: Annotated[int, typer.Option(min=1, help="How many of the last lines.")] = 200,
    json: Json = False,
) -> None:
    """Print the last lines of a deployment's engine."""
    cli = session(ctx)
    with cli.client() as client:
        text = client.logs(model, lines)
    if cli.json:
        print_json({"model": model, "lines": text.split("\n") if text else []})
    else:
        print_text(text.removesuffix("\n"))


def _find(client: Client, name: str) -> DeploymentView | None:
    with suppress(ModelNotFound):
        return client.deployment(name)
    return None


def deployment_facts(d: DeploymentView) -> list[tuple[str, str]]:
    """The plan, where it was placed and why."""
    plan = d.plan
    return [
        ("Served by", "" if d.host == d.model else f"the engine of '{d.host}'"),
        ("Intent", _intent(d)),
        *([] if plan is None else _plan_facts(plan)),
        ("At once", f"{d.maxActiveVariants} variants, by `ostinato tune`" if d.maxActiveVariants else ""),
        ("State", d.reason),
    ]


def _intent(d: DeploymentView) -> str:
    limits = [f"{name} {value:g}" for name, value in d.SLOs.model_dump(exclude_none=True).items()]
    return ", ".join([d.intent, f"answers up to {d.maxOutputLength} tokens", *limits])


def _plan_facts(plan: PlanView) -> list[tuple[str, str]]:
    placed = [("Placed" if i == 0 else " ", _place(rank)) for i, rank in enumerate(plan.ranks)]
    return [
        ("Plan", plan_shape(plan)),
        ("Memory", f"context of {plan.maxModelLen} tokens, {plan.kvCacheTokens} cached"),
        (
            "Variants",
            f"{plan.maxVariants} slots, LoRA up to rank {plan.maxLoraRank}" if plan.maxVariants else "",
        ),
        *placed,
        ("Expected", _expected(plan)),
        ("Why", plan.reason),
    ]


def plan_shape(plan: PlanView) -> str:
    stages = "+".join(map(str, plan.layersPerStage))
    return f"tensor parallel {plan.tensorParallel}, layers {stages}, quantization {plan.quantization}"


def _place(rank: RankView) -> str:
    first, end = rank.layers
    return (
        f"rank {rank.rank} on {rank.node} {rank.device}, layers {first}-{end - 1}, {size(rank.memoryBytes)}"
    )


def _expected(plan: PlanView) -> str:
    return (
        f"first token {plan.estimatedTtftMs:.1f} ms, then {plan.estimatedTpotMs:.1f} ms each, "
        f"accuracy {plan.accuracy:g}%"
    )
