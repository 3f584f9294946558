"""deploy, undeploy, logs."""

from __future__ import annotations

from contextlib import suppress
from enum import StrEnum
from typing import Annotated, Any

import typer

from controlplane.cli.deployment_facts import deployment_facts, plan_facts, variants_at_once
from controlplane.cli.failures import require_success
from controlplane.cli.output import print_facts, print_json, print_text
from controlplane.cli.session import Json, NoWait, session
from controlplane.cli.waiting import follow
from controlplane.client.client import Client
from controlplane.errors import ModelNotFound
from controlplane.management.schemas.deploy import DeployModelRequest
from controlplane.management.schemas.models import DeploymentView
from controlplane.management.schemas.placement import PreviewView
from controlplane.state.terms import LatePolicy, Priority

GIB = 2**30

Name = Annotated[str, typer.Argument(help="A model.")]
TargetTtft = Annotated[float | None, typer.Option(min=0, help="Requests: to the first token.")]
TargetTpot = Annotated[float | None, typer.Option(min=0, help="Requests: per further token.")]
Deadline = Annotated[float | None, typer.Option(min=0, help="Requests: for the whole answer.")]
PriorityOf = Annotated[Priority | None, typer.Option(help="Of requests that name none.")]
ToolCallParser = Annotated[
    str | None, typer.Option(help="What reads tool calls; by the chat template if left out; or none.")
]
ReasoningParser = Annotated[str | None, typer.Option(help="The same for reasoning.")]
Context = Annotated[int | None, typer.Option(min=16, help="Tokens of prompt and answer; or chosen.")]
Requests = Annotated[int | None, typer.Option(min=1, help="Requests an engine runs at once; or chosen.")]
Slots = Annotated[int | None, typer.Option(min=1, help="Variants in one batch; or chosen.")]
LoraRank = Annotated[int | None, typer.Option(min=1, help="Largest rank of adapters; or chosen.")]
HostGib = Annotated[float | None, typer.Option(min=0.001, help="Host memory for variants; or chosen.")]
MergedSlot = Annotated[
    bool | None, typer.Option(help="Keep a copy of the weights for a sparse delta alone; or chosen.")
]
Late = Annotated[LatePolicy | None, typer.Option(help="What becomes of a late request.")]


class IntentOption(StrEnum):
    MIN_COST = "minCost"
    MIN_LAT = "minLat"
    MIN_MEM = "minMem"
    MIN_GPU_HOURS = "minGpuHours"
    LAT_SLO = "latSLO"
    COST_SLO = "costSLO"
    ACC_SLO = "accSLO"


class ScopeOption(StrEnum):
    GPU = "gpu"
    NODE = "node"


def deploy(  # noqa: PLR0913 - typer reads a command's options from its parameters
    ctx: typer.Context,
    model: Name,
    *,
    intent: Annotated[IntentOption, typer.Option(help="What to minimise; limits hold with any.")] = (
        IntentOption.MIN_COST
    ),
    max_output: Annotated[int | None, typer.Option(min=1, help="Tokens at which answers are cut.")] = None,
    e2e_ms: Annotated[float | None, typer.Option(help="Limit for a whole answer.")] = None,
    ttft_ms: Annotated[float | None, typer.Option(help="Limit to the first token.")] = None,
    tpot_ms: Annotated[float | None, typer.Option(help="Limit per further token.")] = None,
    cost: Annotated[float | None, typer.Option(help="Limit of a request, in GiB-seconds by default.")] = None,
    accuracy: Annotated[float | None, typer.Option(help="Least accuracy in percent.")] = None,
    rate: Annotated[float, typer.Option(min=0, help="Requests expected each second.")] = 0.0,
    input_tokens: Annotated[
        int | None, typer.Option(min=1, help="Tokens expected of a prompt (128).")
    ] = None,
    output_tokens: Annotated[
        int | None, typer.Option(min=1, help="Tokens expected of an answer (256, or --max-output).")
    ] = None,
    tp: Annotated[list[int] | None, typer.Option(min=1, help="Allow this degree; repeatable.")] = None,
    pp: Annotated[list[int] | None, typer.Option(min=1, help="Allow so many stages; repeatable.")] = None,
    layers: Annotated[str, typer.Option(help="Layers of each stage, as 10,20.")] = "",
    apart_from: Annotated[str, typer.Option(help="Group of deployments to keep apart from.")] = "",
    apart_by: Annotated[ScopeOption, typer.Option(help="What they may not share.")] = ScopeOption.NODE,
    min_replicas: Annotated[int | None, typer.Option(min=0, help="Fewest engines; 0: none if idle.")] = None,
    max_replicas: Annotated[int | None, typer.Option(min=1, help="Most engines (the least).")] = None,
    target: Annotated[float | None, typer.Option(help="Requests under way per engine to aim at.")] = None,
    idle_s: Annotated[float | None, typer.Option(help="Until the last engine stops if idle.")] = None,
    target_ttft_ms: TargetTtft = None,
    target_tpot_ms: TargetTpot = None,
    deadline_ms: Deadline = None,
    priority: PriorityOf = None,
    late: Late = None,
    context: Context = None,
    requests: Requests = None,
    slots: Slots = None,
    lora_rank: LoraRank = None,
    host_gib: HostGib = None,
    merged_slot: MergedSlot = None,
    tool_call_parser: ToolCallParser = None,
    reasoning_parser: ReasoningParser = None,
    auto_relax: Annotated[bool, typer.Option(help="If nothing fits, take what comes nearest.")] = False,
    max_relax: Annotated[float | None, typer.Option(min=1, help="By no more than this factor.")] = None,
    dry_run: Annotated[bool, typer.Option(help="Say what would be done now; do nothing.")] = False,
    no_wait: NoWait = False,
    json: Json = False,
) -> None:
    """Deploy a registered model; Ostinato chooses how and where by the intent."""
    cli = session(ctx)
    limits = {"e2e_ms": e2e_ms, "ttft_ms": ttft_ms, "tpot_ms": tpot_ms, "cost": cost, "accuracy": accuracy}
    load = {"ratePerS": rate, "inputTokens": input_tokens, "outputTokens": output_tokens}
    body: dict[str, Any] = {
        "model": model,
        "maxOutputLength": max_output,
        "intent": intent.value,
        "SLOs": limits,
        "load": load,
        "tensorParallel": tp or [],
        "pipelineParallel": pp or [],
        "layersPerStage": _split(layers),
        "toolCallParser": tool_call_parser,
        "reasoningParser": reasoning_parser,
    }
    if min_replicas and max_replicas is None:  # the maximum must not be below the minimum
        max_replicas = min_replicas
    if replicas := requested_replicas(min_replicas, max_replicas, target, idle_s):
        body["replicas"] = replicas
    if targets := requested_targets(target_ttft_ms, target_tpot_ms, deadline_ms, priority, late):
        body["targets"] = targets
    if sizes := requested_sizes(context, requests, slots, lora_rank, host_gib, merged_slot):
        body["engine"] = sizes
    if apart_from:
        body["antiAffinity"] = {"group": apart_from, "scope": apart_by.value}
    if auto_relax or max_relax is not None:
        body["autoRelax"] = {"maxFactor": max_relax}
    request = DeployModelRequest.model_validate(body)
    with cli.client() as client:
        if dry_run:
            _show_preview(client.plan_deployment(request), cli.json)
            return
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


def requested_replicas(
    minimum: int | None, maximum: int | None, target: float | None, idle_s: float | None
) -> dict[str, float]:
    """The options that were given, as the API names them."""
    given = {"min": minimum, "max": maximum, "targetInFlight": target, "idleS": idle_s}
    return {name: value for name, value in given.items() if value is not None}


def requested_sizes(
    context: int | None,
    requests: int | None,
    slots: int | None,
    lora_rank: int | None,
    host_gib: float | None,
    merged_slot: bool | None,
) -> dict[str, int]:
    """The options of an engine's size that were given, as the API names them."""
    given = {
        "contextTokens": context,
        "requestsAtOnce": requests,
        "variantSlots": slots,
        "loraRank": lora_rank,
        "variantHostBytes": None if host_gib is None else int(host_gib * GIB),
        "mergedSlot": merged_slot,
    }
    return {name: value for name, value in given.items() if value is not None}


def requested_targets(
    ttft_ms: float | None,
    tpot_ms: float | None,
    deadline_ms: float | None,
    priority: Priority | None,
    late: LatePolicy | None,
) -> dict[str, float | str]:
    """The options that were given, as the API names them."""
    times = {"ttft_ms": ttft_ms, "tpot_ms": tpot_ms, "deadline_ms": deadline_ms}
    given = {**times, "priority": priority, "late": late}
    return {name: value for name, value in given.items() if value is not None}


def _split(layers: str) -> list[int]:
    try:
        return [int(part) for part in layers.split(",")] if layers else []
    except ValueError as error:
        raise typer.BadParameter(
            f"expected numbers of layers as 10,20, got {layers!r}", param_hint="--layers"
        ) from error


def _show_preview(preview: PreviewView, as_json: bool) -> None:
    if as_json:
        print_json({"preview": preview})
        return
    if preview.running:
        print_text(f"the engine of '{preview.host}' would serve it, where it runs now; nothing was done")
    else:
        print_text(f"'{preview.host}' would be deployed so; nothing was done")
    if preview.waits:
        print_text(f"first, it {preview.waits}")
    at_once = [("Variants at once", variants_at_once(preview.variantsAtOnce))]
    print_facts([*([] if preview.plan is None else plan_facts(preview.plan)), *at_once])


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
