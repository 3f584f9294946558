"""The job that measures a profile: its loads, its devices and its bounds. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from controlplane import errors
from controlplane.cluster import reservations
from controlplane.profiling.keys import key_on, profiled_device, served_spec
from controlplane.profiling.usual_engine import BATCHED_TOKENS, usual_engine
from controlplane.settings import Settings
from controlplane.state.records import Model, ModelProfile
from placement.types import CPU, Device, DeviceKey, Inventory, key_of
from profiler.measurements import Timing, from_lines
from profiler.profiling_plan import EngineRun, Reach, count_points, needed_bytes, profiling_plan
from profiler.types import ModelSpec
from workers.measuring.request import MeasureRequest

MEASURED_TOKENS = 2048  # of the longest measured prompt and answer
FREE_SHARE = 0.9  # of the free memory: other processes may need a little meanwhile
HELD_FACTOR = 1.25  # an engine on a CPU takes more than computed; reserve the difference, too


@dataclass(frozen=True)
class ProfilingJob:
    """A measuring request, and the node that carries it out. It takes `held_bytes` of each of the devices
    `held`.

    `quantizations`: the profile's quantizations to measure when the job was made.
    """

    node: str
    request: MeasureRequest
    held: tuple[DeviceKey, ...]
    held_bytes: int
    quantizations: tuple[str, ...] = ()

    @property
    def points(self) -> int:
        return count_points(self.request.engine_runs)

    @property
    def beginning(self) -> str:
        """The message for waiting users."""
        where = f"{self.request.device_kind} of {self.node}"
        return f"measuring the architecture on {where}: an engine with random weights starts"


def profiling_job(
    profile: ModelProfile, model: Model, inventory: Inventory, settings: Settings
) -> ProfilingJob:
    """The job that measures a profile. Errors: ProfilingFailed, which names what is missing.

    The device must be of the profile's kind, even if the cluster now has more devices of another kind.
    """
    if not inventory.devices or model.spec is None or model.path is None:
        raise errors.ProfilingFailed(
            "the cluster has no device to measure on; add a device, then profile the model again"
        )
    device = profiled_device(of_kind(profile, model, inventory, settings))
    if device is None:
        engine = f" with vLLM {profile.engine_version}" if profile.engine_version else ""
        raise errors.ProfilingFailed(
            f"this profile needs {profile.device}{engine}, which the cluster lacks; add such a device, then "
            "profile again"
        )
    if not settings.is_vllm:
        raise errors.ProfilingFailed(
            f"only the engine vllm can be measured, not '{settings.engine}'; set OSTINATO_ENGINE=vllm"
        )
    if not device.engine:
        raise errors.ProfilingFailed(
            f"vLLM is not installed on {device.node}; install vLLM there, then profile the model again"
        )
    on_cpu = device.kind == CPU
    here = [
        d for d in inventory.devices if (d.node, d.model, d.kind) == (device.node, device.model, device.kind)
    ]
    free = sorted(here, key=lambda d: -d.free_bytes)
    device_bytes = min(settings.profile_bytes, int(device.free_bytes * FREE_SHARE))
    enough = [d for d in free if d.free_bytes * FREE_SHARE >= device_bytes]
    spec = served_spec(model.spec, profile.dtype)
    max_model_len = min(MEASURED_TOKENS, settings.max_model_len, spec.max_position)
    usual = usual_engine(device.kind, settings)
    reach = Reach(
        on_cpu,
        len(enough),
        device_bytes,
        max_model_len,
        usual.max_requests,
        BATCHED_TOKENS,
        usual.lora_rank,
        profile.forms,
        usual.slots,
    )
    engine_runs = _engine_runs(spec, reach)
    lacking = _lacking(engine_runs, profile.measurements)
    used = max((run.setting.world_size for run in lacking), default=0)
    return ProfilingJob(
        device.node,
        held=tuple(map(key_of, enough[:used])),
        held_bytes=_held_bytes(spec, lacking, reach),
        quantizations=profile.forms,
        request=MeasureRequest(
            folder=Path(model.path),
            scratch=settings.home / "profiles" / profile.key / str(profile.rounds),
            engine_runs=engine_runs,
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


def _lacking(engine_runs: tuple[EngineRun, ...], measurements: tuple[str, ...]) -> list[EngineRun]:
    """The engine runs with at least one unmeasured load."""
    known = {(m.setting, m.point) for m in from_lines(measurements, "a profile") if isinstance(m, Timing)}
    return [t for t in engine_runs if any((t.setting, point) not in known for point in t.points)]


def _held_bytes(spec: ModelSpec, engine_runs: Sequence[EngineRun], reach: Reach) -> int:
    """The bytes of each device to reserve. On a GPU vLLM fills all its allowed memory with its KV cache."""
    if not reach.on_cpu:
        return reach.device_bytes
    needed = max((needed_bytes(spec, run, reach) for run in engine_runs), default=0)
    return min(reach.device_bytes, int(HELD_FACTOR * needed))


def of_kind(profile: ModelProfile, model: Model, inventory: Inventory, settings: Settings) -> Inventory:
    """The devices that the profile may be measured on."""
    known: dict[tuple[str, str, str], bool] = {}  # a key is a digest, and thousands of devices are equal

    def fits(device: Device) -> bool:
        alike = device.kind, device.model, device.engine
        if alike not in known:
            key = key_on(model, device, settings)
            known[alike] = key is not None and key.text == profile.key
        return known[alike]

    return dataclasses.replace(inventory, devices=tuple(filter(fits, inventory.devices)))


def _engine_runs(spec: ModelSpec, reach: Reach) -> tuple[EngineRun, ...]:
    try:
        return profiling_plan(spec, reach)
    except ValueError as e:
        raise errors.ProfilingFailed(str(e)) from e
