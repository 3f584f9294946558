"""Which profile a model needs, what is to be measured for it, and what is known from it: pure functions."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from controlplane import errors
from controlplane.cluster import reservations
from controlplane.settings import Settings
from controlplane.state.records import Model, ModelProfile, Operation, OperationKind, Phase
from controlplane.state.repository import State, Versioned
from placement.types import CPU, Device, DeviceKey, Inventory
from profiler.campaign import Reach, Trial, campaign, count_points, needed_bytes
from profiler.errors import MeasurementError
from profiler.measurements import Footprint, Timing, from_lines
from profiler.physical.calibrating import calibrate
from profiler.physical.calibration import Calibration
from profiler.plans import form_names
from profiler.profile_key import ProfileKey, profile_key
from profiler.quantization import UNCOMPRESSED
from profiler.roofline import CONTEXT_ONLY, VLLM_ON_CPU, VLLM_ON_GPU, Overheads
from profiler.types import ModelSpec
from workers.measuring.order import MeasureOrder

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
FREE_SHARE = 0.9  # of what is free now: others may need a little meanwhile
HELD_FACTOR = 1.25  # an engine on a CPU takes more than arithmetic says; nobody else is to lack that
MOST_ATTEMPTS = 3  # in a row that bring nothing new


def carrier_kind(inventory: Inventory) -> str:
    """What will carry plans: placement prefers GPUs where there are any."""
    return next((d.kind for d in inventory.devices if d.kind != CPU), CPU)


def carriers(inventory: Inventory) -> list[Device]:
    """The devices that may carry plans: all GPUs, or all CPU hosts where there is no GPU."""
    on_cpu = carrier_kind(inventory) == CPU
    return [d for d in inventory.devices if (d.kind == CPU) == on_cpu]


def engine_dtype(settings: Settings, kind: str) -> str:
    if settings.engine_dtype != "auto":
        return settings.engine_dtype
    return "float32" if kind == CPU else "bfloat16"


def overheads(settings: Settings, kind: str) -> Overheads:
    """What a rank is taken to need beside the model, where no profile tells."""
    if settings.engine != "vllm":
        return CONTEXT_ONLY
    return VLLM_ON_CPU if kind == CPU else VLLM_ON_GPU


def spec_of(model: Model) -> ModelSpec:
    """Errors: NotReady when its files were not read yet."""
    if model.spec is None:
        raise errors.NotReady(f"'{model.name}' has not been profiled")
    return model.spec


def served_spec(spec: ModelSpec, dtype: str) -> ModelSpec:
    """The model as the engine holds it: a checkpoint's bfloat16 weights take twice the room in float32."""
    held = DTYPE_BYTES.get(dtype, spec.dtype_bytes)
    return dataclasses.replace(
        spec,
        dtype_bytes=held,
        layer_weight_bytes=spec.layer_weight_bytes * held // spec.dtype_bytes,
        other_weight_bytes=spec.other_weight_bytes * held // spec.dtype_bytes,
    )


def profiled_device(inventory: Inventory) -> Device | None:
    """The device that stands for all: of the kind that carries plans the commonest model, the freest of it.

    None without devices. Other models in the same cluster are taken for as quick.
    """
    alike = carriers(inventory)
    if not alike:
        return None
    counts = Counter(d.model for d in alike)
    commonest = min(counts, key=lambda model: (-counts[model], model))
    return max((d for d in alike if d.model == commonest), key=lambda d: (d.free_bytes, d.node, -d.index))


def key_of_model(model: Model, inventory: Inventory, settings: Settings) -> ProfileKey | None:
    """Of a base whose files were read; None where there is no device to measure it on."""
    device = profiled_device(inventory)
    return None if device is None else key_on(model, device, settings)


def key_on(model: Model, device: Device, settings: Settings) -> ProfileKey | None:
    """The profile of a model on one device; None for a model whose files were not read."""
    if model.spec is None:
        return None
    dtype = engine_dtype(settings, device.kind)
    return profile_key(served_spec(model.spec, dtype), dtype, device.model or device.kind, device.engine)


def forms_to_measure(model: Model, dtype: str) -> tuple[str, ...]:
    """What a model is registered for beside its uncompressed form, of what engines of this dtype have."""
    names = form_names(model.compression, served_spec(spec_of(model), dtype))
    return tuple(name for name in names if name != UNCOMPRESSED)


def with_forms(profile: ModelProfile, forms: Sequence[str]) -> ModelProfile:
    """To be measured in these as well, from the next time it is begun."""
    every = tuple(sorted({*profile.forms, *forms}))
    return profile if every == profile.forms else dataclasses.replace(profile, forms=every)


def fresh_profile(key: ProfileKey, now_s: float, forms: tuple[str, ...] = ()) -> ModelProfile:
    return ModelProfile(
        key.text,
        key.architecture,
        key.dtype,
        key.device,
        key.engine_version,
        Phase.PENDING,
        reason="waits to be measured",
        created_at_s=now_s,
        updated_at_s=now_s,
        forms=forms,
    )


@dataclass(frozen=True)
class Mission:
    """An order, and the node that is to carry it out; of the devices `held` it takes `held_bytes` each.

    `forms` are those that the profile was to be measured in when it was made.
    """

    node: str
    order: MeasureOrder
    held: tuple[DeviceKey, ...]
    held_bytes: int
    forms: tuple[str, ...] = ()

    @property
    def points(self) -> int:
        return count_points(self.order.trials)

    @property
    def beginning(self) -> str:
        """For people who wait."""
        where = f"{self.order.device_kind} of {self.node}"
        return f"measuring its architecture on {where}: an engine with made-up weights starts"


def mission(profile: ModelProfile, model: Model, inventory: Inventory, settings: Settings) -> Mission:
    """What is to be measured, where, within which bounds. Errors: ProfilingFailed, saying what is lacking.

    Only a device of the profile's own kind will do: since it was asked for, others may be the commonest.
    """
    if not inventory.devices or model.spec is None or model.path is None:
        raise errors.ProfilingFailed("there is no device to measure on; add one and profile again")
    device = profiled_device(of_kind(profile, model, inventory, settings))
    if device is None:
        engine = f" with vLLM {profile.engine_version}" if profile.engine_version else ""
        raise errors.ProfilingFailed(
            f"this profile is of {profile.device}{engine}, and there is none now; add one and profile again"
        )
    if settings.engine != "vllm":
        raise errors.ProfilingFailed(f"the engine '{settings.engine}' is not measured; only vllm is")
    if not device.engine:
        raise errors.ProfilingFailed(f"no vLLM is installed on {device.node}; install it and profile again")
    on_cpu = device.kind == CPU
    here = [
        d for d in inventory.devices if (d.node, d.model, d.kind) == (device.node, device.model, device.kind)
    ]
    free = sorted(here, key=lambda d: -d.free_bytes)
    device_bytes = min(settings.profile_bytes, int(device.free_bytes * FREE_SHARE))
    enough = [d for d in free if d.free_bytes * FREE_SHARE >= device_bytes]
    spec = served_spec(model.spec, profile.dtype)
    max_model_len = min(settings.max_model_len, spec.max_position)
    reach = Reach(
        on_cpu,
        len(enough),
        device_bytes,
        max_model_len,
        settings.concurrency,
        settings.batched_tokens,
        settings.max_lora_rank,
        profile.forms,
    )
    trials = _trials(spec, reach)
    lacking = _lacking(trials, profile.measurements)
    used = max((trial.setting.world_size for trial in lacking), default=0)
    return Mission(
        device.node,
        held=tuple((d.node, d.kind, d.index) for d in enough[:used]),
        held_bytes=_held_bytes(spec, lacking, reach),
        forms=profile.forms,
        order=MeasureOrder(
            folder=Path(model.path),
            scratch=settings.home / "profiles" / profile.key / str(profile.rounds),
            trials=trials,
            known=profile.measurements,
            device_kind=device.kind,
            devices=tuple(d.index for d in enough),
            device_bytes=device_bytes,
            dtype=profile.dtype,
            max_model_len=max_model_len,
            seconds=settings.profile_seconds,
            holder=reservations.measuring(profile.key),
        ),
    )


def _lacking(trials: tuple[Trial, ...], measurements: tuple[str, ...]) -> list[Trial]:
    """Those that not all loads are known of."""
    known = {(m.setting, m.point) for m in from_lines(measurements, "a profile") if isinstance(m, Timing)}
    return [t for t in trials if any((t.setting, point) not in known for point in t.points)]


def _held_bytes(spec: ModelSpec, trials: Sequence[Trial], reach: Reach) -> int:
    """Of each device, what to keep from others. On a GPU vLLM fills all it may use with its KV cache."""
    if not reach.on_cpu:
        return reach.device_bytes
    needed = max((needed_bytes(spec, trial, reach) for trial in trials), default=0)
    return min(reach.device_bytes, int(HELD_FACTOR * needed))


def of_kind(profile: ModelProfile, model: Model, inventory: Inventory, settings: Settings) -> Inventory:
    """The devices that the profile may be measured on."""
    known: dict[tuple[str, str, str], bool] = {}  # a key is a digest, and thousands of devices are alike

    def fits(device: Device) -> bool:
        alike = device.kind, device.model, device.engine
        if alike not in known:
            key = key_on(model, device, settings)
            known[alike] = key is not None and key.text == profile.key
        return known[alike]

    return dataclasses.replace(inventory, devices=tuple(filter(fits, inventory.devices)))


def _trials(spec: ModelSpec, reach: Reach) -> tuple[Trial, ...]:
    try:
        return campaign(spec, reach)
    except ValueError as e:
        raise errors.ProfilingFailed(str(e)) from e


# --- progress -----------------------------------------------------------------------------------------


def attempted(profile: ModelProfile, task: Mission, now_s: float) -> ModelProfile:
    return dataclasses.replace(
        profile,
        phase=Phase.PROFILING,
        attempts=profile.attempts + 1,
        all_points=task.points,
        reason=task.beginning,
        updated_at_s=now_s,
    )


def with_line(
    profile: ModelProfile, line: str, all_points: int, seconds: float, now_s: float
) -> ModelProfile:
    """The profile with one more measurement; what it holds already changes nothing."""
    if line in profile.measurements:
        return profile
    lines = (*profile.measurements, line)
    timed = sum(isinstance(m, Timing) for m in from_lines(lines, profile.key))
    return dataclasses.replace(
        profile,
        measurements=lines,
        points=timed,
        all_points=all_points,
        seconds=profile.seconds + seconds,
        attempts=0,
        reason=described(line, timed, all_points),
        updated_at_s=now_s,
    )


def described(line: str, points: int, all_points: int) -> str:
    """For people who wait."""
    found = next(iter(from_lines([line], "a measurement")))
    count = f"{points} of {all_points} loads measured"
    if isinstance(found, Footprint):
        return f"{count}; an engine of {found.setting.layers} layers started in {found.start_s:.0f} s"
    load = f"{found.point.batch} x {found.point.input_tokens} tokens"
    if found.point.mix:
        load += f" of {', '.join(one.label for one in found.point.mix)}"
    return f"{count}; {load}: TTFT {found.ttft_s * 1e3:.0f} ms, TPOT {found.tpot_s * 1e3:.1f} ms"


def done(profile: ModelProfile, task: Mission, now_s: float) -> ModelProfile:
    """What is left by a measuring that had no problem: it goes on if more forms were asked for meanwhile."""
    grown = not set(profile.forms) <= set(task.forms)
    return resumed(profile, now_s) if grown else ended(profile, "", now_s)


def ended(profile: ModelProfile, problem: str, now_s: float) -> ModelProfile:
    """What a measuring that ended so leaves: Ready if an estimate can be made from it. '' is no problem."""
    usable = calibration(profile.measurements) is not None
    if not problem:
        reason = f"{profile.points} loads measured in {profile.seconds:.0f} s"
        return dataclasses.replace(profile, phase=Phase.READY, reason=reason, updated_at_s=now_s)
    kept = f"{profile.points} of {profile.all_points} loads measured, then: " if usable else ""
    phase = Phase.READY if usable else Phase.FAILED
    return dataclasses.replace(profile, phase=phase, reason=kept + problem, updated_at_s=now_s)


def resumed(profile: ModelProfile, now_s: float) -> ModelProfile:
    """To be measured once more, what is lacking."""
    return dataclasses.replace(
        profile, phase=Phase.PENDING, attempts=0, reason="waits to be measured", updated_at_s=now_s
    )


def waits(profile: ModelProfile, reason: str, now_s: float) -> ModelProfile:
    """Not its turn. That is no attempt, and changes nothing while the reason is the same."""
    if (profile.phase, profile.reason) == (Phase.PENDING, reason):
        return profile
    return dataclasses.replace(profile, phase=Phase.PENDING, reason=reason, updated_at_s=now_s)


def gives_way(profile: ModelProfile, group: str, now_s: float) -> ModelProfile:
    """Its memory goes to a worker group that had to be placed anew. What was measured is kept, and that it
    was begun is no attempt."""
    return dataclasses.replace(
        profile,
        phase=Phase.PENDING,
        attempts=max(0, profile.attempts - 1),
        reason=f"gave its memory to the engine of '{group}', which had to be placed anew; goes on later",
        updated_at_s=now_s,
    )


def is_whole(profile: ModelProfile) -> bool:
    """Whether everything that was planned has been measured, in every form that was asked for."""
    counted = profile.phase is Phase.READY and 0 < profile.all_points <= profile.points
    return counted and set(profile.forms) <= {UNCOMPRESSED, *_measured_forms(profile)}


def _measured_forms(profile: ModelProfile) -> set[str]:
    try:
        return {one.setting.quantization for one in from_lines(profile.measurements, profile.key)}
    except MeasurementError:  # written by another version
        return set()


# --- who waits ----------------------------------------------------------------------------------------


def awaited(state: State) -> Iterator[tuple[str, Operation]]:
    """Open operations that a profile's end will end, registrations and profiles asked for, with its key."""
    for found in state.operations.values():
        op = found.record
        if op.done or op.cancel_requested:
            continue
        model = state.models.get(op.target)
        if model is None or not model.record.profile:
            continue
        if op.kind is OperationKind.PROFILE or (
            op.kind is OperationKind.REGISTER and model.record.phase is Phase.PROFILING
        ):
            yield model.record.profile, op


def waiting(state: State, key: str) -> Iterator[Operation]:
    """Those that wait for this one."""
    return (op for awaits, op in awaited(state) if awaits == key)


def subject(state: State, key: str) -> Model | None:
    """A model of the profile's shape, whose config is to be measured; the oldest."""
    having = [m.record for m in state.models.values() if m.record.profile == key and m.record.path]
    return min(having, key=lambda m: (m.created_at_s, m.name), default=None)


def settled_profile(state: State, model: Model) -> ModelProfile | None:
    """The profile that a model waits for, if there is nothing more to wait for."""
    found = state.profiles.get(model.profile or "")
    return found.record if found and found.record.settled else None


# --- what is known ------------------------------------------------------------------------------------

Profiles = Mapping[str, Versioned[ModelProfile]]


def calibration_for(
    model: Model, inventory: Inventory, settings: Settings, profiles: Profiles
) -> Calibration | None:
    """What was measured of this model's shape on the device that stands for all; None if nothing was."""
    device = profiled_device(inventory)
    return None if device is None else calibration_on(model, device, settings, profiles)


def calibration_on(
    model: Model, device: Device, settings: Settings, profiles: Profiles
) -> Calibration | None:
    """What was measured of this model's shape on devices like this one; None if nothing was."""
    key = key_on(model, device, settings)
    found = profiles.get(key.text) if key else None
    if key is None or found is None or model.spec is None:
        return None
    known = calibration(found.record.measurements)
    return known(served_spec(model.spec, key.dtype)) if known else None


@dataclass(frozen=True)
class _Calibrator:
    lines: tuple[str, ...]

    def __call__(self, spec: ModelSpec) -> Calibration:
        return calibrate(spec, from_lines(self.lines, "a profile"))


@lru_cache(maxsize=256)
def calibration(lines: tuple[str, ...]) -> _Calibrator | None:
    """A fit to these measurements, given a spec; None when they are not enough for one."""
    try:
        timings = [m for m in from_lines(lines, "a profile") if isinstance(m, Timing)]
    except MeasurementError:
        return None
    whole = [t for t in timings if len(t.setting.layers_per_stage) == 1 and not t.point.mix]
    one_step = len({t.setting.batched_tokens for t in timings}) == 1
    return _Calibrator(lines) if whole and one_step else None
