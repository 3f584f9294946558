"""Conversion of requests to records. Pure.

Not in the same module as the requests' schemas: a client has these, and no records.
"""

from __future__ import annotations

import dataclasses

from controlplane import errors
from controlplane.management.schemas.compression import CompressionForm
from controlplane.management.schemas.deploy import (
    NO_PARSER,
    SLO_FIELDS,
    DeployModelRequest,
    EngineForm,
    LoadForm,
    Replicas,
    ReplicasChange,
    SloLimits,
    Targets,
)
from controlplane.settings import Settings
from controlplane.state.deltas import Delta, Recipe
from controlplane.state.records import AutoRelax, ExpectedLoad, PlanConstraints, Scaling, ServingTargets
from placement.types import EngineSizes, Intent, Scope, Slos


def intent(request: DeployModelRequest) -> Intent:
    return Intent.MIN_COST if request.intent in SLO_FIELDS else Intent(request.intent)


def delta(form: CompressionForm | None) -> Delta | None:
    if form is None:
        return None
    recipe = Recipe(
        method=form.chosen,
        bits=form.bits,
        ratio=form.ratio,
        group_size=form.groupSize,
        max_widths=form.maxWidths,
        calibration=form.calibration or "",
        rows=form.rows,
        tokens=form.tokens,
        evaluation=form.evaluation or "",
        max_loss=form.maxLoss,
        lossless=form.lossless,
        device=form.device,
    )
    return Delta(recipe)


def slos(limits: SloLimits) -> Slos:
    return Slos(
        _seconds(limits.e2e_ms),
        _seconds(limits.ttft_ms),
        _seconds(limits.tpot_ms),
        limits.cost,
        limits.accuracy,
    )


def targets(form: Targets | None) -> ServingTargets:
    if form is None:
        return ServingTargets()
    return ServingTargets(
        _seconds(form.ttft_ms), _seconds(form.tpot_ms), _seconds(form.deadline_ms), form.priority, form.late
    )


def changed_targets(present: ServingTargets, change: Targets) -> ServingTargets:
    """The present values with the named changes; null clears a value."""
    fields = {"ttft_ms": "ttft_s", "tpot_ms": "tpot_s", "deadline_ms": "deadline_s"}
    wanted = targets(change)
    named = {fields.get(name, name) for name in change.model_fields_set}
    return dataclasses.replace(present, **{name: getattr(wanted, name) for name in named})


def _seconds(value_ms: float | None) -> float | None:
    return None if value_ms is None else value_ms / 1000


def load(form: LoadForm) -> ExpectedLoad:
    return ExpectedLoad(form.ratePerS, form.inputTokens, form.outputTokens)


def constraints(request: DeployModelRequest) -> PlanConstraints:
    apart = request.antiAffinity
    return PlanConstraints(
        tuple(request.tensorParallel),
        tuple(request.pipelineParallel),
        tuple(request.layersPerStage),
        apart.group if apart else "",
        Scope(apart.scope) if apart else Scope.NONE,
    )


_SIZES = {
    "contextTokens": "context_tokens",
    "requestsAtOnce": "requests_at_once",
    "variantSlots": "variant_slots",
    "loraRank": "lora_rank",
    "variantHostBytes": "variant_host_bytes",
    "mergedSlot": "merged_slot",
}
# The settings that bound the sizes, by field.
_CEILINGS = {
    "contextTokens": "max_model_len",
    "requestsAtOnce": "concurrency",
    "variantSlots": "max_variants",
    "loraRank": "max_lora_rank",
    "variantHostBytes": "variant_host_bytes",
}


def engine(form: EngineForm | None) -> EngineSizes:
    return changed_engine(EngineSizes(), form or EngineForm())


def changed_engine(present: EngineSizes, change: EngineForm) -> EngineSizes:
    """The present values with the named changes; null clears a value."""
    named = {_SIZES[name]: getattr(change, name) for name in change.model_fields_set}
    return dataclasses.replace(present, **named)


def require_ceilings(form: EngineForm | None, settings: Settings) -> None:
    """Refuse a size above the installation's limit. Errors: InvalidRequest."""
    for name, setting in _CEILINGS.items() if form is not None else ():
        asked, most = getattr(form, name), getattr(settings, setting)
        if asked is not None and asked > most:
            raise errors.InvalidRequest(
                f"expected engine.{name} of at most {most}, this installation's limit, got {asked}; lower "
                f"engine.{name}, or raise OSTINATO_{setting.upper()}",
                param=f"engine.{name}",
            )


def scaling(request: DeployModelRequest) -> Scaling:
    replicas = request.replicas or Replicas()
    return Scaling(replicas.min, replicas.max, replicas.targetInFlight, replicas.idleS)


def parser(name: str | None) -> str | None:
    """The parser's name. None: chosen by the model's chat template; "": no parser."""
    return "" if name == NO_PARSER else name


def auto_relax(request: DeployModelRequest) -> AutoRelax:
    chosen = request.autoRelax
    return AutoRelax() if chosen is None else AutoRelax(True, chosen.maxFactor)


def changed_scaling(present: Scaling, change: ReplicasChange) -> Scaling:
    """The present scaling with the changes. Errors: InvalidRequest when `min` would exceed `max`."""
    minimum = present.min_groups if change.min is None else change.min
    maximum = present.max_groups if change.max is None else change.max
    if minimum > maximum:
        raise errors.InvalidRequest(
            f"expected replicas.min <= replicas.max, got {minimum} and {maximum}; change both together",
            param="replicas",
        )
    named = "targetInFlight" in change.model_fields_set
    target = change.targetInFlight if named else present.target_in_flight
    return Scaling(minimum, maximum, target, present.idle_s if change.idleS is None else change.idleS)
