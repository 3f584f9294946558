"""The profile that a model needs, by its architecture, its dtype and the kind of device. Pure."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter

from controlplane import errors
from controlplane.settings import Settings
from controlplane.state.records import Model
from placement.solver.from_inventory import type_name
from placement.types import CPU, Device, Inventory
from profiler.capabilities import compute_capability
from profiler.plans import quantization_names
from profiler.profile_key import ProfileKey, profile_key
from profiler.quantization import UNCOMPRESSED
from profiler.roofline import CONTEXT_ONLY, VLLM_ON_CPU, VLLM_ON_GPU, Overheads
from profiler.types import ModelSpec

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def carrier_kind(inventory: Inventory) -> str:
    """The kind of device that runs plans: placement prefers GPUs where there are any."""
    return next((d.kind for d in inventory.devices if d.kind != CPU), CPU)


def carriers(inventory: Inventory) -> list[Device]:
    """The devices that may run plans: all GPUs, or all CPU hosts where there is no GPU."""
    on_cpu = carrier_kind(inventory) == CPU
    return [d for d in inventory.devices if (d.kind == CPU) == on_cpu]


def ablest_gpu(inventory: Inventory) -> str:
    """The name of the GPU with the highest compute capability (an unknown one counts as the highest); ""
    without GPUs."""
    names = sorted({type_name(device) for device in carriers(inventory) if device.kind != CPU})
    return max(names, key=lambda name: compute_capability(name) or (math.inf, 0), default="")


def engine_dtype(settings: Settings, kind: str) -> str:
    if settings.engine_dtype != "auto":
        return settings.engine_dtype
    return "float32" if kind == CPU else "bfloat16"


def overheads(settings: Settings, kind: str) -> Overheads:
    """The assumed memory of a rank in addition to the model, where no profile exists."""
    if not settings.is_vllm:
        return CONTEXT_ONLY
    return VLLM_ON_CPU if kind == CPU else VLLM_ON_GPU


def spec_of(model: Model) -> ModelSpec:
    """The model's spec. Errors: NotReady when its files were not read yet."""
    if model.spec is None:
        raise errors.NotReady(f"'{model.name}' has no profile; run `ostinato profile {model.name}`")
    return model.spec


def served_spec(spec: ModelSpec, dtype: str) -> ModelSpec:
    """The model as the engine stores it: a checkpoint's bfloat16 weights need twice the memory in float32."""
    held = DTYPE_BYTES.get(dtype, spec.dtype_bytes)
    return dataclasses.replace(
        spec,
        dtype_bytes=held,
        layer_weight_bytes=spec.layer_weight_bytes * held // spec.dtype_bytes,
        other_weight_bytes=spec.other_weight_bytes * held // spec.dtype_bytes,
    )


def profiled_device(inventory: Inventory) -> Device | None:
    """The representative device: the freest device of the commonest model, among the kind that runs plans.

    None without devices. Other models in the same cluster are assumed to be as fast.
    """
    alike = carriers(inventory)
    if not alike:
        return None
    counts = Counter(d.model for d in alike)
    commonest = min(counts, key=lambda model: (-counts[model], model))
    return max((d for d in alike if d.model == commonest), key=lambda d: (d.free_bytes, d.node, -d.index))


def key_of_model(model: Model, inventory: Inventory, settings: Settings) -> ProfileKey | None:
    """The profile's key for a base whose files were read; None where there is no device to measure it on."""
    device = profiled_device(inventory)
    return None if device is None else key_on(model, device, settings)


def key_on(model: Model, device: Device, settings: Settings) -> ProfileKey | None:
    """The profile's key for a model on one device; None for a model whose files were not read."""
    if model.spec is None:
        return None
    dtype = engine_dtype(settings, device.kind)
    return profile_key(served_spec(model.spec, dtype), dtype, device.model or device.kind, device.engine)


def quantizations_to_measure(model: Model, key: ProfileKey) -> tuple[str, ...]:
    """The compressed quantizations of a registered model that engines with the key's dtype support on its
    device."""
    served = served_spec(spec_of(model), key.dtype)
    names = quantization_names(model.compression, served, key.device)
    return tuple(name for name in names if name != UNCOMPRESSED)
