"""A deployment in named facts: its plan, its placement and the reason."""

from __future__ import annotations

from controlplane.cli.output import size
from controlplane.management.schemas.models import DeploymentView
from controlplane.management.schemas.placement import (
    ChoiceView,
    GroupView,
    PlanView,
    RankView,
    VariantsAtOnceView,
)
from profiler.figures import figure, objective_text


def deployment_facts(d: DeploymentView) -> list[tuple[str, str]]:
    """The deployment's plan, its placement and the reason."""
    plan = d.plan
    return [
        ("Served by", "" if d.host == d.model else f"the engine of '{d.host}'"),
        ("Intent", _intent(d)),
        ("Targets", target_facts(d)),
        ("Tool calls", f"{d.toolCallParser}, as set at deployment" if d.toolCallParser else ""),
        ("Reasoning", f"{d.reasoningParser}, as set at deployment" if d.reasoningParser else ""),
        *([] if plan is None else plan_facts(plan)),
        ("Variants at once", variants_at_once(d.variantsAtOnce) + _remedy(d)),
        ("Replicas", _replicas(d)),
        *[(group.name, _group(group)) for group in d.groups if len(d.groups) > 1 or group.reason],
        (
            "Limit",
            f"{d.maxActiveVariants} variants at once, set by `ostinato tune`" if d.maxActiveVariants else "",
        ),
        ("State", d.reason),
    ]


def _replicas(d: DeploymentView) -> str:
    """The replicas; empty for the default of one."""
    replicas = d.replicas
    if replicas is None or (replicas.min, replicas.max) == (1, 1):
        return ""
    serving = sum(group.phase == "Serving" for group in d.groups)
    return f"{serving} of {len(d.groups)} serving; {replicas.min} to {replicas.max}, depending on load"


def _group(group: GroupView) -> str:
    where = dict.fromkeys(f"{r.node} {r.device}" for r in (group.plan.ranks if group.plan else ()))
    return ", ".join(filter(None, (group.phase, *where, group.reason)))


def _intent(d: DeploymentView) -> str:
    limits = [f"{name} {value:g}" for name, value in d.SLOs.model_dump(exclude_none=True).items()]
    rate = [f"{d.load.ratePerS:g} requests/s expected"] if d.load.ratePerS else []
    apart = [f"no {d.antiAffinity.scope} shared with group {d.antiAffinity.group}"] if d.antiAffinity else []
    longest = "the context's end" if d.maxOutputLength is None else f"{d.maxOutputLength} tokens"
    return ", ".join([d.intent, f"answers up to {longest}{_assumed(d)}", *limits, *rate, *apart])


def _assumed(d: DeploymentView) -> str:
    """The length of answers that the estimates are for, if the deployment does not say it."""
    choice = d.plan.choice if d.plan else None
    if d.load.outputTokens is not None or choice is None or not choice.outputTokens:
        return ""
    return f", {choice.outputTokens} tokens assumed"


def target_facts(d: DeploymentView) -> str:
    given = d.targets.model_dump(exclude_none=True, mode="json")
    return ", ".join(
        f"{name} {value:g}" if isinstance(value, float) else f"{name} {value}"
        for name, value in given.items()
    )


def variants_at_once(seen: VariantsAtOnceView | None) -> str:
    """The number of registered variants that run at once; empty where there are none."""
    if seen is None or not seen.registered:
        return ""
    if seen.atOnce == seen.registered:
        return f"all {seen.registered} registered" if seen.registered > 1 else "the only registered variant"
    without = f"; {', '.join(seen.tooLarge)} cannot run: too large for this engine" if seen.tooLarge else ""
    return f"any {seen.atOnce} of {seen.registered} registered{without}"


def _remedy(d: DeploymentView) -> str:
    """A remedy if the engine's memory allows fewer variants at once than its slots."""
    seen, plan = d.variantsAtOnce, d.plan
    if seen is None or plan is None or seen.atOnce >= min(plan.maxVariants, seen.registered):
        return ""
    return f"; `ostinato tune {d.host} --place-anew` makes room for more, if devices have free memory"


def plan_facts(plan: PlanView) -> list[tuple[str, str]]:
    placed = [("Placed" if i == 0 else " ", _place(rank)) for i, rank in enumerate(plan.ranks)]
    return [
        ("Plan", plan_shape(plan)),
        ("Memory", f"context of {plan.maxModelLen} tokens, {plan.kvCacheTokens} cached{_at_once(plan)}"),
        ("Variants", _slots(plan)),
        *placed,
        ("Expected", _expected(plan)),
        *([] if plan.choice is None else _choice_facts(plan.choice)),
        ("Why", plan.reason),
    ]


def _at_once(plan: PlanView) -> str:
    return f", {plan.requestsAtOnce} requests at once" if plan.requestsAtOnce else ""


def _slots(plan: PlanView) -> str:
    if not plan.maxVariants:
        return ""
    host = f", {size(plan.variantHostBytes)} of host memory" if plan.variantHostBytes else ""
    merged = ", a second copy of the weights to merge a delta into" if plan.mergedSlot else ""
    return f"{plan.maxVariants} slots, LoRA up to rank {plan.maxLoraRank}{host}{merged}"


def _choice_facts(choice: ChoiceView) -> list[tuple[str, str]]:
    known = {"profile": "from its profile", "rough": "rough, without a profile"}.get(
        choice.basis, choice.basis
    )
    ranges = [
        f"{name} {figure(interval.low)} to {figure(interval.high)} ms"
        for name, interval in (("first token", choice.ttftMs), ("each further", choice.tpotMs))
        if interval is not None
    ]
    busy = f", busy {max(choice.utilisation):.0%}" if any(choice.utilisation) else ""
    return [
        ("Certainty", ", ".join([known, *ranges])),
        ("Capacity", f"up to {figure(choice.throughputPerS)} requests/s{busy}"),
        ("Objective", f"{_objective(choice)}, best of {choice.alternatives} layouts"),
        ("Relaxed", " and ".join(relaxation.text for relaxation in choice.relaxed)),
    ]


def _objective(choice: ChoiceView) -> str:
    return objective_text(choice.objective, choice.unit, choice.inputTokens, choice.outputTokens)


def plan_shape(plan: PlanView) -> str:
    stages = "+".join(map(str, plan.layersPerStage))
    return f"tensor parallel {plan.tensorParallel}, layers {stages}, quantization {plan.quantization}"


def _place(rank: RankView) -> str:
    first, end = rank.layers
    memory = size(rank.memoryBytes)
    if rank.measuredBytes is not None:
        memory = f"planned {memory}, measured {size(rank.measuredBytes)}"
    return f"rank {rank.rank} on {rank.node} {rank.device}, layers {first}-{end - 1}, {memory}"


def _expected(plan: PlanView) -> str:
    return (
        f"first token {figure(plan.estimatedTtftMs)} ms, then {figure(plan.estimatedTpotMs)} ms each, "
        f"accuracy {plan.accuracy:g}%"
    )
