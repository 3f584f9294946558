"""Predictions of what plans cost, from the records, the devices and the settings. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from controlplane import errors
from controlplane.planning.engine_config import kinds_served
from controlplane.planning.engine_sizes import known_sizes, variant_sizes
from controlplane.planning.variant_room import AtOnce, at_once, with_room_for_variants
from controlplane.profiling import request_paths
from controlplane.profiling.calibrations import BUSY, calibration_for, measured_while_busy
from controlplane.profiling.keys import (
    ablest_gpu,
    carrier_kind,
    carriers,
    engine_dtype,
    overheads,
    profiled_device,
    served_spec,
)
from controlplane.profiling.usual_engine import usual_engine
from controlplane.settings import Settings
from controlplane.state.queries import find_model
from controlplane.state.records import Deployment, Model
from controlplane.state.repository import State
from placement.pareto import pareto
from placement.solver.view import slowdown_of
from placement.types import CPU, Inventory
from profiler.errors import PlanError
from profiler.physical.calibration import Calibration
from profiler.plans import candidate_plans, even_stages, quantization_names
from profiler.predicting.predict import Ground, Prediction, check_plan, predict
from profiler.quantization import UNCOMPRESSED
from profiler.request_path import ASSUMED, RequestPath
from profiler.types import DeviceRates, ModelSpec, Plan, Workload
from profiler.variants.types import VariantSpec

GIB = 2**30
MAX_DEVICES = 64


@dataclass(frozen=True)
class Load:
    """`batch` requests at once. They go to `variants` in turn; the base may be named among them.

    `devices` is a supposed number of devices like the cluster's freest, one for each rank; None means the
    devices that the cluster has.
    """

    batch: int
    input_tokens: int
    output_tokens: int
    variants: tuple[str, ...] = ()
    devices: int | None = None


@dataclass(frozen=True)
class Shape:
    """How a model is split; without `layers_per_stage` it has `pipeline_parallel` even stages."""

    tensor_parallel: int = 1
    pipeline_parallel: int | None = None
    layers_per_stage: tuple[int, ...] | None = None
    quantization: str = UNCOMPRESSED


@dataclass(frozen=True)
class Answer:
    """A plan of the base `model` and its prediction.

    `cost_gib_s` is all ranks' memory x the load's latency (MaverIQ, section 4, formulation 1). A plan is
    `pareto` when no other plan of the same question beats it in every respect.
    """

    model: str
    plan: Plan
    load: Load
    prediction: Prediction
    pareto: bool | None = None
    at_once: AtOnce | None = None

    @property
    def memory_bytes(self) -> float:
        return sum(rank.total.value for rank in self.prediction.ranks)

    @property
    def cost_gib_s(self) -> float:
        return self.memory_bytes / GIB * self.prediction.latency_s.value


def answer(
    state: State, inventory: Inventory, settings: Settings, name: str, shape: Shape, load: Load
) -> Answer:
    """What one plan of a model costs under a load, on the cluster's devices or those that `load` supposes.

    Errors: ModelNotFound, NotReady, InvalidRequest with the field that is wrong.
    """
    question = _question(state, inventory, settings, name, load)
    return question.answer(_plan(question.spec, shape))


def answer_all(
    state: State, inventory: Inventory, settings: Settings, name: str, load: Load
) -> tuple[Answer, ...]:
    """Every plan of a model, in each quantization that it is registered for, fewest ranks first.

    Errors: as `answer`.
    """
    question = _question(state, inventory, settings, name, load)
    count = max(1, len(inventory.devices)) if load.devices is None else load.devices
    if not 1 <= count <= MAX_DEVICES:
        raise errors.InvalidRequest(
            f"expected 1 to {MAX_DEVICES} devices, got {count}; correct `devices`", param="devices"
        )
    gpu = ablest_gpu(inventory)
    quantizations = quantization_names(question.base.compression, question.spec, gpu)
    plans = candidate_plans(question.spec, quantizations, count, question.spec.max_position, 1, 0, 0)
    answers = [question.answer(plan) for plan in plans]
    best = pareto([(a.prediction.latency_s.value, a.cost_gib_s, a.memory_bytes) for a in answers])
    return tuple(dataclasses.replace(a, pareto=good) for a, good in zip(answers, best, strict=True))


@dataclass(frozen=True)
class _Question:
    base: Model
    spec: ModelSpec
    variants: tuple[Model, ...]
    mix: tuple[VariantSpec | None, ...]
    load: Load
    inventory: Inventory
    settings: Settings
    known: Calibration | None
    path: RequestPath
    path_note: str
    profile_note: str
    own: frozenset[str]  # worker groups of this base: their work is what is asked about
    deployment: Deployment | None  # of this base

    def answer(self, plan: Plan) -> Answer:
        kind = carrier_kind(self.inventory)
        sizes = variant_sizes(self.variants, self.spec, kind, self.settings, self.deployment)
        plan = with_room_for_variants(plan, self.spec, sizes, self.variants)
        known = known_sizes(self.deployment).requests_at_once
        at_once_most = known or usual_engine(kind, self.settings).max_requests
        work = Workload(self.load.batch, self.load.input_tokens, self.load.output_tokens)
        try:
            check_plan(self.spec, plan, ablest_gpu(self.inventory))
            _check_devices(plan, self.load.devices)
            here = _ground(self.spec, plan, self.inventory, self.known, self.settings)
            launched = _launched(self.inventory, self.variants)
            here = dataclasses.replace(here, launched=launched, path=self.path)
            if self.load.devices is not None:
                here = _apart(here, plan, self.inventory)
            cost = predict(here, plan, work, self.mix)
            cost = _within_engine(cost, work, at_once_most)
            if self.load.devices is None:
                cost = _beside_others(cost, plan, self.inventory, self.own)
            notes = (*cost.notes, self.path_note, self.profile_note, self._note_of_turns(plan))
            noted = dataclasses.replace(cost, notes=tuple(filter(None, notes)))
            fitting = at_once(plan, self.spec, self.variants)
            return Answer(self.base.name, plan, self.load, noted, at_once=fitting)
        except PlanError as e:
            raise _refusal(e) from e

    def _note_of_turns(self, plan: Plan) -> str:
        """Where the load asks for more variants than run at once."""
        asked = [variant for variant in self.variants if variant.name in self.load.variants]
        found = at_once(plan, self.spec, asked)
        if found is None or found.count == found.registered:
            return ""
        return (
            f"only {found.count} of these {found.registered} variants run at once: latency is longer than "
            "estimated here, because other variants wait (engine.variantSlots of the deployment)"
        )


def _within_engine(cost: Prediction, work: Workload, at_once: int) -> Prediction:
    """An engine runs at most `at_once` requests at once, however much memory is left."""
    fits = cost.concurrency
    limited = dataclasses.replace(cost, concurrency=None if fits is None else min(fits, at_once))
    if work.batch <= at_once:
        return limited
    note = (
        f"an engine runs {at_once} of these {work.batch} requests at once (engine.requestsAtOnce): the "
        "others wait, which these figures do not include"
    )
    return dataclasses.replace(limited, notes=(*limited.notes, note))


def _beside_others(cost: Prediction, plan: Plan, inventory: Inventory, own: frozenset[str]) -> Prediction:
    """Widen the intervals while other work keeps the devices busy: everything may take longer in proportion
    to the time that is left. Ranks use the devices with the least load."""
    loads = sorted(
        max(0.0, device.load - sum(share for holder, share in device.work if holder in own))
        for device in carriers(inventory)
    )[: max(1, plan.world_size)]
    load = max(loads, default=0.0)
    if load < BUSY:
        return cost
    longer = slowdown_of(load)
    slower = {
        name: dataclasses.replace(interval, high=interval.high * longer)
        for name in ("ttft_s", "tpot_s", "ttft_last_s", "step_s", "latency_s")
        for interval in (getattr(cost, name),)
    }
    note = (
        f"other work keeps the device {load:.0%} busy: these figures are for an idle device, with upper "
        f"ends {longer:.1f} times as high"
    )
    rate = dataclasses.replace(cost.tokens_per_s, low=cost.tokens_per_s.low / longer)
    return dataclasses.replace(cost, **slower, tokens_per_s=rate, notes=(*cost.notes, note))


def _question(state: State, inventory: Inventory, settings: Settings, name: str, load: Load) -> _Question:
    """A variant's name means its base under a load of this variant, unless the load names others."""
    model = find_model(state, name)
    base = find_model(state, model.base) if model.base else model
    if base.spec is None:
        raise errors.NotReady(f"'{base.name}' is {base.phase}; wait until its files are read", param="model")
    names = load.variants or ((name,) if model.is_variant else ())
    variants = state.variants_of(base.name)
    return _Question(
        base,
        served_spec(base.spec, engine_dtype(settings, carrier_kind(inventory))),
        tuple(variants),
        _mix(base, variants, names),
        dataclasses.replace(load, variants=tuple(names)),
        inventory,
        settings,
        calibration_for(base, inventory, settings, state.profiles),
        request_paths.known_path(state, settings, inventory.devices) or ASSUMED,
        request_paths.note(state, settings, inventory.devices),
        measured_while_busy(base, inventory, settings, state.profiles),
        frozenset(
            group
            for d in state.deployments.values()
            if d.record.base == base.name
            for group in d.record.group_ids()
        ),
        state.deployments[base.name].record if base.name in state.deployments else None,
    )


def _check_devices(plan: Plan, devices: int | None) -> None:
    if devices is not None and not plan.world_size <= devices <= MAX_DEVICES:
        raise PlanError(
            "devices",
            f"expected {plan.world_size} to {MAX_DEVICES} devices for {plan.world_size} ranks, got "
            f"{devices}; correct `devices`, or leave it out",
        )


def _ground(
    spec: ModelSpec, plan: Plan, inventory: Inventory, known: Calibration | None, settings: Settings
) -> Ground:
    """The facts for an estimate of `plan`, before anything is placed.

    Ranks take the devices with the most free memory first.
    """
    rates, kind = _rates(plan, inventory), carrier_kind(inventory)
    shared = plan.world_size if kind == CPU else 1
    beside = overheads(settings, kind)
    return Ground(spec, tuple(rates), known, _free_bytes(plan, inventory), shared, overheads=beside)


def _launched(inventory: Inventory, variants: Sequence[Model]) -> tuple[str, ...]:
    """Engines on a CPU capture no graphs, and launch what a batch needs."""
    kind = carrier_kind(inventory)
    return () if kind == CPU else kinds_served(kind, variants)


def _free_bytes(plan: Plan, inventory: Inventory) -> tuple[int, ...]:
    """The free memory of each rank's device; empty when there are too few devices. Ranks share a CPU."""
    free = sorted((d.free_bytes for d in carriers(inventory)), reverse=True)
    if carrier_kind(inventory) == CPU and free:
        return (free[0] // plan.world_size,) * plan.world_size
    return tuple(free[: plan.world_size]) if len(free) >= plan.world_size else ()


def _rates(plan: Plan, inventory: Inventory) -> list[DeviceRates]:
    """Each rank has the rates of the slowest device, because nothing is placed yet.

    The ranks of a stage that share a CPU run at the same time and divide its rates; stages take turns.
    """
    slowest = min(
        (d.rates for d in carriers(inventory)),
        key=lambda r: r.memory_bytes_per_s,
        default=DeviceRates(1e9, 1e9),
    )
    share = plan.tensor_parallel if carrier_kind(inventory) == CPU else 1
    return [DeviceRates(slowest.memory_bytes_per_s / share, slowest.flops_per_s / share)] * plan.world_size


def _apart(here: Ground, plan: Plan, inventory: Inventory) -> Ground:
    """The same with one device for each rank, like the freest one."""
    device = profiled_device(inventory)
    if device is None:
        return here
    alone = (device.rates,) * plan.world_size
    return dataclasses.replace(here, rates=alone, free_bytes=(device.free_bytes,) * plan.world_size, shared=1)


def _mix(base: Model, variants: Sequence[Model], names: Sequence[str]) -> tuple[VariantSpec | None, ...]:
    """Errors: InvalidRequest for a name that is not a variant of this base."""
    known = {v.name: v.variant_spec for v in variants if v.variant_spec is not None}
    unknown = [n for n in names if n != base.name and n not in known]
    if unknown:
        got, ready = ", ".join(map(repr, unknown[:5])), ", ".join(sorted(known)) or "none are"
        raise errors.InvalidRequest(
            f"expected variants of '{base.name}' that are Ready ({ready}), got {got}; register these "
            "variants with this base, or leave them out",
            param="variants",
        )
    return tuple(None if n == base.name else known[n] for n in names)


def _plan(spec: ModelSpec, shape: Shape) -> Plan:
    try:
        split = _split(spec, shape)
    except PlanError as e:
        raise _refusal(e) from e
    return Plan(shape.tensor_parallel, split, shape.quantization, spec.max_position, 0, 0, 0)


def _split(spec: ModelSpec, shape: Shape) -> tuple[int, ...]:
    layers, stages = shape.layers_per_stage, shape.pipeline_parallel
    if stages is not None and not 1 <= stages <= spec.num_layers:
        raise PlanError(
            "pipelineParallel",
            f"expected 1 to {spec.num_layers} stages, because each needs a layer, got {stages}; choose fewer "
            "stages",
        )
    if layers is None:
        return even_stages(spec.num_layers, stages or 1)
    if stages is not None and stages != len(layers):
        raise PlanError(
            "layersPerStage",
            f"expected layersPerStage to list {stages} stages, got {len(layers)}; leave one of the "
            "fields out",
        )
    return layers


def _refusal(e: PlanError) -> errors.InvalidRequest:
    return errors.InvalidRequest(str(e), param=e.field)
