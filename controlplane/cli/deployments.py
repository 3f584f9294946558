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

Name = Annotated[str, typer.Argument(help="A registered model.")]
TargetTtft = Annotated[float | None, typer.Option(min=0, help="Requests' target: ms to the first token.")]
TargetTpot = Annotated[float | None, typer.Option(min=0, help="Requests' target: ms per further token.")]
Deadline = Annotated[float | None, typer.Option(min=0, help="Requests' target: ms to the whole answer.")]
PriorityOf = Annotated[Priority | None, typer.Option(help="Priority of requests that name no priority.")]
MinReplicas = Annotated[int | None, typer.Option(min=0, help="Fewest engines; 0: no engine while idle.")]
TargetInFlight = Annotated[float | None, typer.Option(help="Target number of running requests per engine.")]
Idle = Annotated[float | None, typer.Option(help="Idle seconds after which the last engine stops.")]
ToolCallParser = Annotated[
    str | None, typer.Option(help="vLLM's parser of tool calls, or none. Default: as the chat template says.")
]
ReasoningParser = Annotated[str | None, typer.Option(help="vLLM's parser of reasoning, or none.")]
Context = Annotated[
    int | None, typer.Option(min=16, help="Tokens of prompt and answer together. Default: chosen.")
]
Requests = Annotated[
    int | None, typer.Option(min=1, help="Requests that an engine runs at once. Default: chosen.")
]
Slots = Annotated[int | None, typer.Option(min=1, help="Variants in one batch. Default: chosen.")]
LoraRank = Annotated[int | None, typer.Option(min=1, help="Largest rank of LoRA adapters. Default: chosen.")]
HostGib = Annotated[
    float | None, typer.Option(min=0.001, help="Host memory for variants, in GiB. Default: chosen.")
]
MergedSlot = Annotated[
    bool | None,
    typer.Option(help="Keep a copy of the weights to merge a sparse delta into. Default: chosen."),
]
Late = Annotated[LatePolicy | None, typer.Option(help="Whether late requests are finished or dropped.")]


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
    intent: Annotated[IntentOption, typer.Option(help="What to minimise. Limits hold with every intent.")] = (
        IntentOption.MIN_COST
    ),
    max_output: Annotated[int | None, typer.Option(min=1, help="Longest answer, in tokens.")] = None,
    e2e_ms: Annotated[float | None, typer.Option(help="Limit of a whole answer's time.")] = None,
    ttft_ms: Annotated[float | None, typer.Option(help="Limit of the time to the first token.")] = None,
    tpot_ms: Annotated[float | None, typer.Option(help="Limit of the time per further token.")] = None,
    cost: Annotated[
        float | None, typer.Option(help="Limit of a request's cost, in GiB-seconds by default.")
    ] = None,
    accuracy: Annotated[float | None, typer.Option(help="Lowest accuracy, in percent.")] = None,
    rate: Annotated[float, typer.Option(min=0, help="Expected requests per second.")] = 0.0,
    input_tokens: Annotated[
        int | None, typer.Option(min=1, help="Expected tokens of a prompt (128).")
    ] = None,
    output_tokens: Annotated[
        int | None, typer.Option(min=1, help="Expected tokens of an answer (256, or --max-output).")
    ] = None,
    tp: Annotated[
        list[int] | None, typer.Option(min=1, help="Allow this tensor parallelism; repeatable.")
    ] = None,
    pp: Annotated[
        list[int] | None, typer.Option(min=1, help="Allow this number of pipeline stages; repeatable.")
    ] = None,
    layers: Annotated[str, typer.Option(help="Layers of each pipeline stage, such as 10,20.")] = "",
    apart_from: Annotated[
        str, typer.Option(help="An anti-affinity group: its deployments are kept apart.")
    ] = "",
    apart_by: Annotated[
        ScopeOption, typer.Option(help="What deployments of the group may not share.")
    ] = ScopeOption.NODE,
    min_replicas: MinReplicas = None,
    max_replicas: Annotated[
        int | None, typer.Option(min=1, help="Most engines. Default: as --min-replicas.")
    ] = None,
    target: TargetInFlight = None,
    idle_s: Idle = None,
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
    auto_relax: Annotated[
        bool, typer.Option(help="If no plan meets the limits, take the nearest plan.")
    ] = False,
    max_relax: Annotated[
        float | None,
        typer.Option(min=1, help="For --auto-relax: largest factor by which a limit may be exceeded."),
    ] = None,
    dry_run: Annotated[bool, typer.Option(help="Show what would be done, and do nothing.")] = False,
    no_wait: NoWait = False,
    json: Json = False,
) -> None:
    """Deploy a registered model. Ostinato chooses plan and devices by the intent."""
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
            f"expected numbers of layers such as 10,20, got {layers!r}", param_hint="--layers"
        ) from error


def _show_preview(preview: PreviewView, as_json: bool) -> None:
    if as_json:
        print_json({"preview": preview})
        return
    if preview.running:
        print_text(f"the running engine of '{preview.host}' would serve the variant; nothing was done")
    else:
        print_text(f"'{preview.host}' would be deployed as follows; nothing was done")
    if preview.waits:
        print_text(f"before that, the deployment {preview.waits}")
    at_once = [("Variants at once", variants_at_once(preview.variantsAtOnce))]
    print_facts([*([] if preview.plan is None else plan_facts(preview.plan)), *at_once])


def undeploy(ctx: typer.Context, model: Name, no_wait: NoWait = False, json: Json = False) -> None:
    """Stop serving a model. The model stays registered."""
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
    lines: Annotated[int, typer.Option(min=1, help="Number of lines to print, from the end.")] = 200,
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
