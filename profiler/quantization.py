"""How an engine can hold a model's hidden layers: as they are, or quantized as it reads them.

A model is registered with the accuracy of each technique (MaverIQ, Table 1). Those that are a quantization
here can be launched; others are kept with the model, and never chosen."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

UNCOMPRESSED = "none"
ALIASES = frozenset({"none", "bf16", "fp16", "float32"})


@dataclass(frozen=True)
class Quantization:
    """`engine` is vLLM's name of it (`--quantization`). Each weight of a linear layer takes `weight_bytes`,
    each of its outputs `output_bytes` for a scale, and rows and columns must be multiples of `multiple`;
    biases, routers, norms, embedding and head stay as they are. Engines have it for numbers of `dtype_bytes`
    only, on GPUs of `min_capability` (`profiler.capabilities`). While it quantizes, an engine takes
    `once_bytes` that it keeps."""

    engine: str
    weight_bytes: int
    output_bytes: int
    multiple: int
    dtype_bytes: int
    min_capability: tuple[int, int]
    once_bytes: int = 0


QUANTIZATIONS: Mapping[str, Quantization] = {
    # e4m3, a scale for each output; activations are quantized token by token as they come. What comes once:
    # vLLM 0.26 on H200s, whatever the depth (benchmarks/results/profiling).
    "fp8": Quantization(
        "fp8_per_channel",
        weight_bytes=1,
        output_bytes=4,
        multiple=16,
        dtype_bytes=2,
        min_capability=(8, 9),
        once_bytes=32 << 20,
    ),
}


SERVABLE = ALIASES | QUANTIZATIONS.keys()  # names of techniques that can be launched


def canonical(quantization: str) -> str:
    """One name for all that mean the model as it is."""
    return UNCOMPRESSED if quantization in ALIASES else quantization


def engine_name(quantization: str) -> str:
    """What vLLM calls a quantization; a name that is not one of ours is taken for the engine's own."""
    known = QUANTIZATIONS.get(quantization)
    return known.engine if known else quantization


def once_bytes(quantization: str) -> int:
    """What each rank takes for a quantization, whatever its layers."""
    known = QUANTIZATIONS.get(quantization)
    return known.once_bytes if known else 0


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
