"""The plans worth estimating: every split of a model that the engine can launch, with even stages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from profiler.capabilities import gpu_problem
from profiler.quantization import QUANTIZATIONS, SERVABLE, UNCOMPRESSED, allows_uncompressed
from profiler.shards import cut_problem
from profiler.types import ModelSpec, Plan


def candidate_plans(
    spec: ModelSpec,
    quantizations: Sequence[str],
    devices: int,
    max_model_len: int,
    concurrency: int,
    max_variants: int,
    max_lora_rank: int,
) -> tuple[Plan, ...]:
    """Every (TP, PP) with TP x PP <= devices that the engine can launch, in each quantization, fewest ranks
    first.

    The KV cache holds `concurrency` sequences of `max_model_len` tokens. Plans have slots for variants only
    if the model can have variants. Raises ValueError for impossible settings.
    """
    _check(spec, devices, max_model_len, concurrency, max_variants, max_lora_rank)
    splits = [
        (tp, pp, quantization)
        for quantization in quantizations
        for tp in range(1, min(devices, spec.num_heads) + 1)
        if cut_problem(spec, tp, quantization) is None
        for pp in range(1, min(devices // tp, spec.num_layers) + 1)
    ]
    return tuple(
        Plan(
            tensor_parallel=tp,
            layers_per_stage=even_stages(spec.num_layers, pp),
            quantization=quantization,
            max_model_len=max_model_len,
            kv_cache_tokens=concurrency * max_model_len,
            max_variants=max_variants if spec.adaptable else 0,
            max_lora_rank=max_lora_rank if spec.adaptable else 0,
        )
        for tp, pp, quantization in sorted(splits, key=lambda split: (split[0] * split[1], split))
    )


def quantization_names(compression: Mapping[str, float], served: ModelSpec, gpu: str = "") -> tuple[str, ...]:
    """The usable quantizations of a model registered with these techniques, uncompressed first. `served`
    describes the model in the engine; `gpu` is the GPU's name ("": a CPU host, or any device). Empty if there
    is none: `no_quantization_reason` says why."""
    known = sorted(QUANTIZATIONS.keys() & compression.keys())
    quantized = [name for name in known if quantization_problem(served, name, gpu) is None]
    return ((UNCOMPRESSED,) if allows_uncompressed(compression) else ()) + tuple(quantized)


def quantization_problem(served: ModelSpec, quantization: str, gpu: str = "") -> str | None:
    """Why no engine can hold a model in this quantization on a GPU of this name; None if a single rank
    can."""
    if problem := gpu_problem(quantization, gpu):
        return problem
    if QUANTIZATIONS[quantization].dtype_bytes != served.dtype_bytes:
        return (
            f"{quantization} needs engines with bfloat16 or float16, but these have another dtype "
            "(OSTINATO_ENGINE_DTYPE)"
        )
    return cut_problem(served, 1, quantization)


def no_quantization_reason(compression: Mapping[str, float], served: ModelSpec, gpu: str = "") -> str:
    """Why `quantization_names` found none, as text for the user."""
    known = sorted(QUANTIZATIONS.keys() & compression.keys())
    why = ", ".join(problem for name in known if (problem := quantization_problem(served, name, gpu)))
    servable = ", ".join(sorted(SERVABLE))
    return (
        f"the model is registered only for {', '.join(sorted(compression))}, which cannot be served"
        + (f" ({why})" if why else "")
        + f"; register the model with one of {servable}, too"
    )


def even_stages(layers: int, stages: int) -> tuple[int, ...]:
    """vLLM's default split: the remaining layers go to the stages before the last, from the back."""
    split = [layers // stages] * stages
    for extra in range(layers % stages):
        split[-2 - extra] += 1
    return tuple(split)


def _check(spec: ModelSpec, *settings: int) -> None:
    devices, max_model_len, concurrency, max_variants, max_lora_rank = settings
    if min(devices, max_model_len, concurrency) < 1 or min(max_variants, max_lora_rank) < 0:
        raise ValueError(f"impossible (devices, length, concurrency, variants, rank): {settings}")
    if max_model_len > spec.max_position:
        raise ValueError(
            f"expected max_model_len of at most the model's {spec.max_position} positions, got "
            f"{max_model_len}"
        )
