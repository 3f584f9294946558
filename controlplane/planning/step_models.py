"""Step times of a base's engines, from its records, for routing decisions at run time. Pure.

Each group that serves has the step model of its plan on its devices; equal groups share one model. The
figures are estimates: from the profile of this architecture on such a device, scaled from another device's
profile, or rough (`profiler.predicting`).
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeVar

import numpy as np

from controlplane.planning.engine_config import engine_config
from controlplane.profiling import request_paths
from controlplane.profiling.calibrations import calibration_on
from controlplane.profiling.keys import key_on, overheads, served_spec, spec_of
from controlplane.settings import Settings
from controlplane.state.records import Deployment, Model
from controlplane.state.repository import State
from controlplane.state.worker_groups import GroupPhase
from placement.types import CPU, Device, Inventory, Placement, key_of
from profiler.compiled import Records, records
from profiler.errors import PlanError
from profiler.physical.calibration import Calibration
from profiler.predicting.types import Ground
from profiler.step_time.records import STEP_MODEL, VARIANT
from profiler.step_time.sampling import Added, sampled_part, step_model, with_parts
from profiler.types import DeviceRates, Plan
from profiler.variants.types import VariantSpec
from workers.messages import EngineConfig

# Rate at which a variant's bytes reach each GPU; GPUs copy their shares in parallel. An adapter of 320 MB
# took 20 ms longer to its first token from host memory than from a slot (one H200, PCIe 5).
GPU_LOAD_BYTES_PER_S = 16e9
# From files in the page cache to packed form in host memory: the same adapter took 0.6 s longer.
FETCH_BYTES_PER_S = 0.5e9

T = TypeVar("T")


@dataclass(frozen=True)
class StepModels:
    """`models` [M] and `variants` [M, V] are records of `profiler.step_time`. `model_of_group` is the model
    of a group's engine, by the group's id. `variant_rows` is the place of a variant, by its uid; 0 is the
    base."""

    models: Records
    variants: Records
    model_of_group: Mapping[str, int]
    variant_rows: Mapping[int, int]

    def is_same(self, other: StepModels | None) -> bool:
        return (
            other is not None
            and self.model_of_group == other.model_of_group
            and self.variant_rows == other.variant_rows
            and np.array_equal(self.models, other.models)
            and np.array_equal(self.variants, other.variants)
        )


class Memo:
    """Results computed for the last answer, by content. For the next answer only new results are computed,
    and unneeded ones are forgotten. `pause` is called after each computation."""

    def __init__(self, pause: Callable[[], None] = lambda: None) -> None:
        self._pause = pause
        self._before: dict[Hashable, Any] = {}
        self._now: dict[Hashable, Any] = {}

    def begin(self) -> None:
        """Begin the next answer."""
        self._before, self._now = self._before | self._now, {}

    def end(self) -> None:
        """The answer is complete."""
        self._before = {}

    def get(self, key: Hashable, make: Callable[[], T]) -> T:
        if key not in self._now:
            if key in self._before:
                self._now[key] = self._before[key]
            else:
                self._now[key] = make()
                self._pause()
        found: T = self._now[key]
        return found


def step_models(
    state: State, inventory: Inventory, settings: Settings, base: str, memo: Memo | None = None
) -> StepModels | None:
    """Step models of all groups of `base` that serve, and of all its variants. Groups on devices that are not
    in the inventory, or with a plan that cannot be estimated, have no model. None if no group has a model."""
    model, deployment = state.models.get(base), state.deployments.get(base)
    if model is None or deployment is None or model.record.spec is None:
        return None
    memo = memo or Memo()
    memo.begin()
    variants = sorted((v for v in state.variants_of(base) if v.variant_spec), key=lambda v: v.uid)
    engines = _Engines(state, inventory, settings, model.record, variants, memo)
    found: dict[Hashable, _Sampled] = {}
    key_of_group: dict[str, Hashable] = {}
    for group_id, placement in _served_placements(deployment.record):
        config = engine_config(model.record, placement, settings, variants, group=group_id)
        engine = engines.of(placement, config)
        sampled = found.get(engine.key) if engine else None
        if engine and sampled is None:
            sampled = engines.sampled(engine)
        if engine and sampled:
            found[engine.key], key_of_group[group_id] = sampled, engine.key
    memo.end()
    return _together(found, key_of_group, variants) if found else None


def _served_placements(deployment: Deployment) -> list[tuple[str, Placement]]:
    groups = zip(deployment.group_ids(), deployment.groups, strict=True)
    return [(id, g.placement) for id, g in groups if g.phase is GroupPhase.SERVING and g.placement]


@dataclass(frozen=True)
class _Engine:
    """A kind of engine, and everything that its step model depends on; `key` is its content."""

    key: Hashable
    ground: Ground
    plan: Plan
    max_rows: int
    load_bytes_per_s: float


class _Sampled(NamedTuple):
    model: Records  # [1]
    variants: Records  # [V]


@dataclass(frozen=True)
class _Known:
    """A calibration, the rates of its device, and a key for its content."""

    key: Hashable
    calibration: Calibration
    rates: DeviceRates


@dataclass(frozen=True)
class _Engines:
    state: State
    inventory: Inventory
    settings: Settings
    model: Model
    variants: Sequence[Model]
    memo: Memo

    def of(self, placement: Placement, config: EngineConfig) -> _Engine | None:
        """The engine of a placement; None if a device is currently unknown."""
        devices = {key_of(device): device for device in self.inventory.devices}
        on = [devices.get(rank.device) for rank in placement.ranks]
        used = [device for device in on if device is not None]
        if not used or len(used) != len(on):
            return None
        slowest = min(used, key=lambda d: (d.rates.memory_bytes_per_s, d.rates.flops_per_s))
        known = self._known(slowest)
        on_cpu, tp = slowest.kind == CPU, placement.plan.tensor_parallel
        share = tp if on_cpu and known is None else 1
        shared = max(Counter(rank.device for rank in placement.ranks).values()) if on_cpu else 1
        plan = dataclasses.replace(placement.plan, batched_tokens=_step_tokens(config))
        ground = Ground(
            served_spec(spec_of(self.model), config.dtype),
            tuple(_divided(device.rates, share) for device in used),
            known.calibration if known else None,
            shared=shared,
            measured=known.rates if known and known.rates != slowest.rates else None,
            overheads=overheads(self.settings, slowest.kind),
            launched=() if on_cpu else config.variant_kinds,
            path=request_paths.known_path(self.state, self.settings, self.inventory.devices),
        )
        key = (
            self.model.uid,
            plan,
            ground.rates,
            known.key if known else None,
            *(shared, ground.measured, ground.overheads, ground.launched, ground.path),
            *(config.dtype, config.max_num_seqs),
        )
        load_bytes_per_s = (
            slowest.rates.memory_bytes_per_s / 2 if on_cpu else GPU_LOAD_BYTES_PER_S * plan.world_size
        )
        return _Engine(key, ground, plan, config.max_num_seqs, load_bytes_per_s)

    def _known(self, device: Device) -> _Known | None:
        """The calibration of devices like this one, else of any measured device of the same sort (GPU or
        CPU)."""
        others = sorted(
            (d for d in self.inventory.devices if (d.kind == CPU) == (device.kind == CPU)), key=key_of
        )
        return next((known for d in (device, *others) if (known := self._known_on(d))), None)

    def _known_on(self, device: Device) -> _Known | None:
        key = key_on(self.model, device, self.settings)
        profile = self.state.profiles.get(key.text) if key else None
        if key is None or profile is None:
            return None
        content = ("calibration", self.model.uid, key.text, profile.record.measurements)
        found = self.memo.get(
            content, lambda: calibration_on(self.model, device, self.settings, self.state.profiles)
        )
        return _Known(content, found, device.rates) if found else None

    def sampled(self, engine: _Engine) -> _Sampled | None:
        """The step model and its variants; None for a plan that cannot be estimated."""
        made = self.memo.get(("model", engine.key), partial(_model, engine))
        specs = [v.variant_spec for v in self.variants if v.variant_spec]
        parts = [self._part(engine, spec) for spec in specs]
        known = [part for part in parts if part]
        if made is None or len(known) < len(parts):
            return None
        model = made.copy().view(np.recarray)
        found = with_parts(model, engine.ground, specs, known, engine.load_bytes_per_s)
        found.fetch_s = found.bytes / FETCH_BYTES_PER_S
        return _Sampled(model, found)

    def _part(self, engine: _Engine, spec: VariantSpec) -> Added | None:
        return self.memo.get(("variant", engine.key, _content(spec)), partial(_variant, engine, spec))


def _model(engine: _Engine) -> Records | None:
    try:
        return step_model(engine.ground, engine.plan, engine.max_rows, engine.plan.max_variants)
    except PlanError:
        return None


def _variant(engine: _Engine, spec: VariantSpec) -> Added | None:
    try:
        return sampled_part(engine.ground, engine.plan, spec)
    except PlanError:
        return None


def _divided(rates: DeviceRates, ranks: int) -> DeviceRates:
    return DeviceRates(rates.memory_bytes_per_s / ranks, rates.flops_per_s / ranks)


def _step_tokens(config: EngineConfig) -> int:
    """The most tokens of a step, as vLLM is started (`workers.group.vllm_arguments`)."""
    return max(config.max_batched_tokens, config.max_num_seqs)


def _content(spec: VariantSpec) -> Hashable:
    """The content of a spec, which is equal for equal variants; a spec itself is not hashable."""
    values = (getattr(spec, f.name) for f in dataclasses.fields(spec) if f.name != "modules")
    return (*values, tuple(spec.modules.items()))


def _together(
    found: Mapping[Hashable, _Sampled], key_of_group: Mapping[str, Hashable], variants: Sequence[Model]
) -> StepModels:
    numbers = {key: number for number, key in enumerate(found)}
    models = records(STEP_MODEL, len(found))
    parts = records(VARIANT, (len(found), 1 + len(variants)))
    for number, sampled in enumerate(found.values()):
        models[number], parts[number] = sampled.model[0], sampled.variants
    rows = {variant.uid: row for row, variant in enumerate(variants, start=1)}
    return StepModels(models, parts, {group: numbers[key] for group, key in key_of_group.items()}, rows)
