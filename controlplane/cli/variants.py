"""tune, prefetch."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Annotated

import typer

from controlplane.cli.deployment_facts import target_facts
from controlplane.cli.deployments import (
    Context,
    Deadline,
    HostGib,
    Idle,
    Late,
    LoraRank,
    MergedSlot,
    MinReplicas,
    PriorityOf,
    Requests,
    Slots,
    TargetInFlight,
    TargetTpot,
    TargetTtft,
    requested_replicas,
    requested_sizes,
    requested_targets,
)
from controlplane.cli.output import print_json, print_table, print_text
from controlplane.cli.residency import print_residency, where
from controlplane.cli.session import Json, session
from controlplane.cli.waiting import Progress, live_line
from controlplane.client import variant_limit_profile
from controlplane.client.client import Client
from controlplane.client.variant_limit_profile import Burst, Profile
from controlplane.errors import EngineFailed
from controlplane.management.schemas.deploy import EngineForm, ReplicasChange, Targets
from controlplane.management.schemas.models import DeploymentView
from controlplane.management.schemas.placement import GroupView
from controlplane.state.terms import GroupPhase

LOOK_S = 1.0


def tune(  # noqa: PLR0913 - typer reads a command's options from its parameters
    ctx: typer.Context,
    model: Annotated[str, typer.Argument(help="A deployed base. Targets may also be set for a variant.")],
    *,
    max_active_variants: Annotated[
        int | None, typer.Option(min=1, help="Number of its variants that may run at once.")
    ] = None,
    min_replicas: MinReplicas = None,
    max_replicas: Annotated[int | None, typer.Option(min=1, help="Most engines.")] = None,
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
    place_anew: Annotated[
        bool,
        typer.Option(
            "--place-anew",
            help="Replace the engines by new engines of newly chosen sizes. Options of size do so, too.",
        ),
    ] = False,
    profile: Annotated[
        bool, typer.Option("--profile", help="Measure the best number of variants at once, and set it.")
    ] = False,
    seconds: Annotated[
        float, typer.Option(min=0.5, max=600, help="For --profile: seconds for each number of variants.")
    ] = Burst.seconds,
    concurrency: Annotated[
        int, typer.Option(min=1, max=256, help="For --profile: requests at once.")
    ] = Burst.concurrency,
    ttft_ms: Annotated[
        float | None, typer.Option(min=0, help="For --profile: longest median time to the first token.")
    ] = None,
    json: Json = False,
) -> None:
    """Change a deployed base: how many variants run at once (set or measured), the number of engines,
    the requests' targets, or the engines' sizes."""
    cli = session(ctx)
    named = requested_replicas(min_replicas, max_replicas, target, idle_s)
    aimed = requested_targets(target_ttft_ms, target_tpot_ms, deadline_ms, priority, late)
    sizes = requested_sizes(context, requests, slots, lora_rank, host_gib, merged_slot)
    place_anew = place_anew or bool(sizes)
    if profile + place_anew + (max_active_variants is not None or bool(named) or bool(aimed)) != 1:
        raise typer.BadParameter(
            "expected one kind of change in each command: --profile; or engines of another size "
            "(--place-anew, --context, --requests, --slots, --lora-rank, --host-gib, --merged-slot); "
            "or all other options; run `ostinato tune` once for each kind"
        )
    measured: Profile | None = None
    with cli.client() as client:
        if place_anew:
            with live_line(quiet=cli.json) as show:
                deployment = placed_anew(client, model, show, EngineForm(**sizes) if sizes else None)
        elif not profile:
            replicas = ReplicasChange.model_validate(named) if named else None
            wanted = {name: value or None for name, value in aimed.items()}
            targets = Targets.model_validate(wanted) if wanted else None
            deployment = client.tune(model, max_active_variants, replicas, targets=targets)
        else:
            limit_s = None if ttft_ms is None else ttft_ms / 1000
            with live_line(quiet=cli.json) as show:
                measured = variant_limit_profile.run(
                    client, model, Burst(seconds, concurrency), limit_s, show
                )
            deployment = client.deployment(model)
    if cli.json:
        print_json({"deployment": deployment, "measurements": _documents(measured)})
        return
    if measured is not None:
        _print_profile(measured)
    if place_anew:
        names = ", ".join(group.name for group in deployment.groups if group.phase == GroupPhase.SERVING)
        served = f"is served by {names}" if names else "will start its next engine"
        print_text(f"'{model}' {served}, with memory for the variants registered now")
    if named and (now := deployment.replicas):
        print_text(f"'{model}' has {now.min} to {now.max} engines, depending on load")
    if aimed:
        print_text(f"targets of requests to '{model}': {target_facts(deployment) or 'none'}")
    if profile or max_active_variants is not None:
        print_text(f"'{model}' runs up to {deployment.maxActiveVariants} variants at once")
        print_residency(deployment)


def placed_anew(
    client: Client, model: str, show: Progress, sizes: EngineForm | None = None
) -> DeploymentView:
    """The deployment after new engines of these sizes have replaced the present engines.

    Errors: those of the call; EngineFailed when a new engine did not come to serve.
    """
    replaced = [g.name for g in client.deployment(model).groups if g.phase == GroupPhase.SERVING]
    deployment = client.tune(model, place_anew=True, engine=sizes)
    while awaited := _successors(deployment, replaced):
        show("; ".join(f"{group.name}: {group.phase} {group.reason}".rstrip() for group in awaited))
        time.sleep(LOOK_S)
        deployment = client.deployment(model)
    return deployment


def _successors(deployment: DeploymentView, replaced: Sequence[str]) -> list[GroupView]:
    """The groups that will replace these and have not yet. Other groups may come and go by load.

    Errors: EngineFailed when one of these groups serves and no group will replace it.
    """
    left = [g for g in deployment.groups if g.name in replaced and g.phase != GroupPhase.DRAINING]
    coming = {g.replaces: g for g in deployment.groups if g.replaces and g.phase != GroupPhase.DRAINING}
    for group in left:
        if group.name not in coming and group.phase == GroupPhase.SERVING:
            why = group.reason.replace("; ", ", ") or "no new engine replaced it"
            raise EngineFailed(
                f"{group.name} was not replaced and still serves: {why}; new engines need memory in addition "
                "to the old engines: `ostinato cluster` shows which models hold it, `ostinato undeploy "
                f"OTHER` frees it; or undeploy '{deployment.model}' and deploy it again: it pauses meanwhile"
            )
    return [coming[group.name] for group in left if group.name in coming]


def _documents(profile: Profile | None) -> list[dict[str, float]]:
    return [
        {
            "maxActiveVariants": m.limit,
            "tokensPerSecond": round(m.tokens_per_s, 2),
            "ttftMs": round(m.ttft_s * 1000, 1),
            "requests": m.requests,
        }
        for m in (profile.measurements if profile else ())
    ]


def _print_profile(profile: Profile) -> None:
    rows = [
        (
            str(m.limit),
            f"{m.tokens_per_s:.1f}",
            f"{m.ttft_s * 1000:.0f} ms",
            str(m.requests),
            "chosen" if m.limit == profile.chosen else "",
        )
        for m in profile.measurements
    ]
    print_table(("AT ONCE", "TOKENS/S", "TTFT (MEDIAN)", "REQUESTS", ""), rows, empty="nothing was measured")


def prefetch(
    ctx: typer.Context,
    variants: Annotated[list[str], typer.Argument(metavar="VARIANT...", help="Deployed variants.")],
    json: Json = False,
) -> None:
    """Read variants into host memory before their next requests."""
    cli = session(ctx)
    deployments = []
    with cli.client() as client, live_line(quiet=cli.json) as show:
        for name in variants:
            show(f"reading '{name}'")
            deployments.append(client.prefetch(name))
    if cli.json:
        print_json({"deployments": deployments})
        return
    for deployment in deployments:
        print_text(f"'{deployment.model}' is {where(deployment)}")
