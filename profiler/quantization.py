"""How an engine can hold a model's hidden layers: unchanged, or quantized while it reads them.

A model is registered with the accuracy of each technique (MaverIQ, Table 1). Techniques that are a
quantization here can be launched; other techniques are kept with the model, but never chosen."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

UNCOMPRESSED = "none"
ALIASES = frozenset({"none", "bf16", "fp16", "float32"})


@dataclass(frozen=True)
class Quantization:
    """`engine` is vLLM's name for it (`--quantization`). Each weight of a linear layer takes `weight_bytes`,
    each of its outputs `output_bytes` for a scale. Rows and columns must be multiples of `multiple`; biases,
    routers, norms, embedding and head stay as they are. Engines support it only for numbers of `dtype_bytes`
    on GPUs of `min_capability` (`profiler.capabilities`). Quantizing takes `once_bytes`, which the engine
    keeps."""

    engine: str
    weight_bytes: int
    output_bytes: int
    multiple: int
    dtype_bytes: int
    min_capability: tuple[int, int]
    once_bytes: int = 0


QUANTIZATIONS: Mapping[str, Quantization] = {
    # e4m3, a scale for each output; activations are quantized token by token as they come. `once_bytes`:
    # vLLM 0.26 on H200s, at any depth (benchmarks/results/profiling).
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
    """The one name for all aliases of an unquantized model."""
    return UNCOMPRESSED if quantization in ALIASES else quantization


def engine_name(quantization: str) -> str:
    """vLLM's name for a quantization; an unknown name is taken for the engine's own."""
    known = QUANTIZATIONS.get(quantization)
    return known.engine if known else quantization


def once_bytes(quantization: str) -> int:
    """Bytes that each rank takes for a quantization, whatever its layers."""
    known = QUANTIZATIONS.get(quantization)
    return known.once_bytes if known else 0


def allows_uncompressed(compression: Mapping[str, float]) -> bool:
    """Whether the model may run uncompressed; so it is if no technique is registered."""
    return not compression or bool(ALIASES & set(compression))


def accuracy_of(compression: Mapping[str, float], quantization: str = UNCOMPRESSED) -> float:
    """The registered accuracy (MaverIQ, Table 1); 1.0 for an uncompressed model without a registered one.

    If several aliases of "none" are registered, the lowest accuracy counts. Raises KeyError for an
    unregistered technique.
    """
    if quantization not in ALIASES:
        return compression[quantization]
    return min((compression[name] for name in ALIASES & set(compression)), default=1.0)
