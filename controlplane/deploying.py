"""A deployment's pure part: estimate -> choose -> place. What launches it is in `launching`.

Each step is a function of `profiler` or `placement`; this module only hands one's result to the next.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from controlplane import errors
from controlplane.profiling import (
    CPU,
    Profiles,
    calibration_for,
    carrier_kind,
    carriers,
    engine_dtype,
    served_spec,
    spec_of,
)
from controlplane.records import Deployment, Model
from controlplane.settings import Settings
from placement.choose import choose
from placement.place import place_best
from placement.types import Candidate, Infeasible, Inventory, Placement, Plan
from profiler.estimating import Ground, plan_estimate
from profiler.physical.calibration import Calibration
from profiler.plans import accuracy_of, candidate_plans, no_plan_reason
from profiler.types import DeviceRates, ModelSpec, Workload
from profiler.variants.types import VariantKind

# Latency SLOs are judged for one request of this prompt length (MaverIQ evaluates batch 1 as well).
JUDGED_INPUT_TOKENS = 128
# What alignment in an engine's memory adds to a variant's bytes, generously.
PACKING = 1.05


def decide(
    model: Model,
    deployment: Deployment,
    inventory: Inventory,
    settings: Settings,
    variants: Sequence[Model] = (),
    profiles: Profiles = MappingProxyType({}),
) -> Placement:
    """The placement that best meets the deployment's intent, with room for the base's `variants`.

    Estimates are calibrated where `profiles` has this architecture on this kind of device, else rough.
    Errors: NoFeasiblePlan, saying why.
    """
    spec = served_spec(spec_of(model), engine_dtype(settings, carrier_kind(inventory)))
    known = calibration_for(model, inventory, settings, profiles)
    candidates = [
        with_estimate(ground(spec, plan, inventory, known), model.compression, plan, deployment)
        for plan in _plans(spec, model.compression, inventory, settings, variants)
    ]
    if not candidates:
        raise errors.NoFeasiblePlan(no_plan_reason(model.compression))
    ranked = choose(candidates, deployment.intent, deployment.slos, deployment.max_output_tokens)
    if isinstance(ranked, Infeasible):
        raise _refusal(ranked)
    placed = place_best(ranked, inventory)
    if isinstance(placed, Infeasible):
        raise _refusal(placed)
    return placed


def _refusal(outcome: Infeasible) -> errors.NoFeasiblePlan:
    hints = f" Possible: {'; '.join(outcome.relaxations)}." if outcome.relaxations else ""
    return errors.NoFeasiblePlan(
        f"{outcome.reason}.{hints}".replace("..", "."), details={"relaxations": list(outcome.relaxations)}
    )


def _plans(
    spec: ModelSpec,
    compression: Mapping[str, float],
    inventory: Inventory,
    settings: Settings,
    variants: Sequence[Model],
) -> list[Plan]:
    plans = candidate_plans(
        spec,
        compression,
        devices=max(1, len(inventory.devices)),
        max_model_len=min(settings.max_model_len, spec.max_position),
        concurrency=settings.concurrency,
        max_variants=settings.max_variants,
        max_lora_rank=settings.max_lora_rank,
    )
    return [with_room_for_variants(plan, spec, settings, variants) for plan in plans]


def with_room_for_variants(
    plan: Plan, spec: ModelSpec, settings: Settings, variants: Sequence[Model]
) -> Plan:
    """The plan with slots as engines of this installation have them, for the base's `variants`."""
    delta_bytes, full_bytes = variant_demand(variants, settings.max_variants)
    return dataclasses.replace(
        plan,
        max_variants=settings.max_variants if spec.adaptable else 0,
        max_lora_rank=settings.max_lora_rank if spec.adaptable else 0,
        delta_bytes=delta_bytes,
        full_bytes=full_bytes,
        batched_tokens=settings.batched_tokens,
    )


def with_estimate(
    known: Ground, compression: Mapping[str, float], plan: Plan, deployment: Deployment
) -> Candidate:
    workload = Workload(1, JUDGED_INPUT_TOKENS, deployment.max_output_tokens)
    accuracy = accuracy_of(compression, plan.quantization)
    return Candidate(plan, plan_estimate(known, plan, workload, accuracy))


def ground(spec: ModelSpec, plan: Plan, inventory: Inventory, known: Calibration | None) -> Ground:
    """What is known when `plan` is estimated, before anything is placed.

    Each rank has the memory that is free on a device now, the freest first.
    """
    rates = _rates(plan, inventory)
    shared = plan.world_size if carrier_kind(inventory) == CPU else 1
    return Ground(spec, tuple(rates), known, _free_bytes(plan, inventory), shared)


def _free_bytes(plan: Plan, inventory: Inventory) -> tuple[int, ...]:
    """Of each rank's device; empty when there are too few devices. Ranks share a CPU."""
    free = sorted((d.free_bytes for d in carriers(inventory)), reverse=True)
    if carrier_kind(inventory) == CPU and free:
        return (free[0] // plan.world_size,) * plan.world_size
    return tuple(free[: plan.world_size]) if len(free) >= plan.world_size else ()


def variant_demand(variants: Sequence[Model], slots: int) -> tuple[int, int]:
    """Bytes in hidden layers, and bytes of full tensors, of the `slots` largest variants other than LoRA."""
    specs = [v.variant_spec for v in variants if v.variant_spec and v.variant_spec.kind != VariantKind.LORA]
    layers = sorted((s.weight_bytes - s.full_bytes for s in specs), reverse=True)[:slots]
    full = sorted((s.full_bytes for s in specs), reverse=True)[:slots]
    return int(sum(layers) * PACKING), sum(full)


def _rates(plan: Plan, inventory: Inventory) -> list[DeviceRates]:
    """Each rank's rates, before anything is placed: those of the slowest device. Ranks share a CPU."""
    slowest = min(
        (d.rates for d in inventory.devices),
        key=lambda r: r.memory_bytes_per_s,
        default=DeviceRates(1e9, 1e9),
    )
    share = plan.world_size if carrier_kind(inventory) == CPU else 1
    return [DeviceRates(slowest.memory_bytes_per_s / share, slowest.flops_per_s / share)] * plan.world_size
