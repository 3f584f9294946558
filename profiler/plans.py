"""Which plans are worth estimating: every way to split a model that the engine can launch, stages even."""

from __future__ import annotations

from collections.abc import Mapping

from profiler.shards import tp_fits
from profiler.types import ModelSpec, Plan

UNCOMPRESSED = "none"
ALIASES = frozenset({"none", "bf16", "fp16", "float32"})


def candidate_plans(
    spec: ModelSpec,
    compression: Mapping[str, float],
    devices: int,
    max_model_len: int,
    concurrency: int,
    max_variants: int,
    max_lora_rank: int,
) -> tuple[Plan, ...]:
    """Every (TP, PP) with TP x PP <= devices that the engine can launch, fewest ranks first.

    The KV cache holds `concurrency` sequences of `max_model_len` tokens. There are slots for variants only
    where the model can have some. Empty when no technique in `compression` can be planned yet:
    `no_plan_reason` says so. Raises ValueError for impossible settings.
    """
    _check(spec, devices, max_model_len, concurrency, max_variants, max_lora_rank)
    if not allows_uncompressed(compression):
        return ()
    splits = [
        (tp, pp)
        for tp in range(1, min(devices, spec.num_heads) + 1)
        if tp_fits(spec, tp)
        for pp in range(1, min(devices // tp, spec.num_layers) + 1)
    ]
    return tuple(
        Plan(
            tensor_parallel=tp,
            layers_per_stage=even_stages(spec.num_layers, pp),
            quantization=UNCOMPRESSED,
            max_model_len=max_model_len,
            kv_cache_tokens=concurrency * max_model_len,
            max_variants=max_variants if spec.adaptable else 0,
            max_lora_rank=max_lora_rank if spec.adaptable else 0,
        )
        for tp, pp in sorted(splits, key=lambda split: (split[0] * split[1], split))
    )


def allows_uncompressed(compression: Mapping[str, float]) -> bool:
    """Nothing registered means the model as it is."""
    return not compression or bool(ALIASES & set(compression))


def accuracy_of(compression: Mapping[str, float], quantization: str = UNCOMPRESSED) -> float:
    """The registered accuracy (MaverIQ, Table 1); 1.0 for an uncompressed model without one.

    With several aliases of "none", the least of them. Raises KeyError for an unregistered technique.
    """
    if quantization not in ALIASES:
        return compression[quantization]
    return min((compression[name] for name in ALIASES & set(compression)), default=1.0)


def no_plan_reason(compression: Mapping[str, float]) -> str:
    """Why `candidate_plans` returned none, in words for the user."""
    names = ", ".join(sorted(compression))
    return (
        f"the model is registered for {names} only, which cannot be served yet; "
        f"register it with one of {', '.join(sorted(ALIASES))} as well"
    )


def even_stages(layers: int, stages: int) -> tuple[int, ...]:
    """vLLM's default split: what is left over goes to the stages before the last, from the back."""
    split = [layers // stages] * stages
    for extra in range(layers % stages):
        split[-2 - extra] += 1
    return tuple(split)


def _check(spec: ModelSpec, *settings: int) -> None:
    devices, max_model_len, concurrency, max_variants, max_lora_rank = settings
    if min(devices, max_model_len, concurrency) < 1 or min(max_variants, max_lora_rank) < 0:
        raise ValueError(f"impossible (devices, length, concurrency, variants, rank): {settings}")
    if max_model_len > spec.max_position:
        raise ValueError(f"max_model_len {max_model_len} exceeds the model's {spec.max_position} positions")
