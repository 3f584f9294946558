"""Laws of time and memory over tensor parallelism, pipeline stages and batch. Pure arithmetic.

Every law is 1 (or nothing) at the measured configuration, and never decreases with the batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from controlplane.baselines.estimators.maveriq import EXPONENTS, Exponents

SHARPNESS = 4.0  # of the smooth maximum: 19% above both values where they are equal, 1.5% above at half

WEIGHT_BITS: Mapping[str, float] = {"float16": 16, "bfloat16": 16, "int8": 8, "fp8": 8, "int4": 4} | {
    "int4_gptq": 4.25, "int4_awq": 4.25, "float32": 32,
}  # fmt: skip

# FLOPs that a GPU sustains in thin products while it reads one byte. On paper an A100 does 156, an A6000 201,
# an H200 206, an H100 295. Products of few rows reach about half of the FLOPs; reads reach about 85% of the
# bytes.
FLOPS_PER_BYTE = 135.0
# Prompts make thick products, which reach more of the FLOPs: a prompt's token takes this share of a single
# token's time.
PROMPT_TOKEN = 0.75

# There are two kernels for weights of few bits: one for at most four rows, and a slower one for more rows.
FEW_ROWS = 4
MANY_ROWS: Mapping[str, float] = dict.fromkeys(("int8", "int4", "int4_gptq", "int4_awq"), 1.08)

# Elements of keys and values, per token and layer, of the paper's models (their config.json).
KV_ELEMENTS: Mapping[str, int] = {
    "falcon-7b": 2 * 64, "falcon-40b": 2 * 8 * 64, "gptj-6b": 2 * 4096, "gpt-j-6b": 2 * 4096,
    "llama-2-7b": 2 * 4096, "llama-2-13b": 2 * 5120, "llama-2-70b": 2 * 8 * 128,
}  # fmt: skip


def smooth_max(a: float, b: float) -> float:
    """max(a, b) without the corner: (a^4 + b^4)^(1/4), for a, b >= 0."""
    top = max(a, b)
    if top <= 0:
        return 0.0
    low: float = (min(a, b) / top) ** SHARPNESS
    return top * float((1 + low) ** (1 / SHARPNESS))


def weight_bytes_per_value(dtype: str) -> float:
    return WEIGHT_BITS.get(dtype, 16) / 8


def compute_share(dtype: str) -> float:
    """The ratio of the time to compute one token to the time to read the weights: 2 FLOPs per value over
    its bytes."""
    return 2 / weight_bytes_per_value(dtype) / FLOPS_PER_BYTE


def kv_bytes(model: str, dtype: str, int8_kv: bool, layer_bytes: float) -> float:
    """Bytes of the keys and values of one token in one layer, unsharded.

    For an unlisted model: assume a layer of 12 h^2 weights, and half the size of h-wide keys and values,
    which lies between full and grouped-query attention.
    """
    values = layer_bytes / weight_bytes_per_value(dtype)
    elements = KV_ELEMENTS.get(model, (values / 12) ** 0.5)
    return float(elements * (1 if int8_kv else 2))


def exponents(dtype: str, int8_kv: bool) -> Exponents:
    """The published exponents; for other formats the exponents of the same number of bits."""
    bits = WEIGHT_BITS.get(dtype, 16)
    near = "float16" if bits > 8 else "int8" if bits > 5 else "int4_gptq" if bits > 4 else "int4"
    return EXPONENTS.get((dtype, int8_kv)) or EXPONENTS[near, int8_kv and near != "int4_gptq"]


def allreduce_growth(by: Exponents, ranks: int, measured_ranks: int) -> float:
    """The ratio of the overhead of tensor parallelism at `ranks` to that at `measured_ranks`; both above
    1."""
    return float(((ranks - 1) / (measured_ranks - 1)) ** by.beta)


@dataclass(frozen=True)
class BatchLaw:
    """The growth of a pass's parts with the batch, relative to batch `reference`.

    `compute`: time to compute a token over the time to read a layer. `prompt`: the same for one sequence's
    prompt. `kv`: time to read one cached token of one sequence, relative to the same. `sequence`: growth per
    sequence of the work outside the layers. `message`: growth per sequence of an all-reduce's time. `many`:
    reading weights for more than four rows relative to reading them for one. `prompt_tokens`: length of the
    prompts. `fixed`: a layer's time that neither bytes nor operations explain (launches, the host), relative
    to reading it; no batch changes this time.
    """

    reference: int
    compute: float
    prompt: float
    kv: float
    sequence: float
    message: float
    many: float
    prompt_tokens: float
    output_tokens: float  # mean of the fingerprints, for the cache they read
    fixed: float = 0.0

    def decode(self, batch: int, output_tokens: float) -> float:
        return self._read(batch, output_tokens) / self._read(self.reference, self.output_tokens)

    def prefill(self, batch: int) -> float:
        return self.prompt_pass(self.prompt * batch) / self.prompt_pass(self.prompt * self.reference)

    def prompt_pass(self, compute: float) -> float:
        """A layer's time for prompts relative to that for one token; computing takes `compute` of the
        latter."""
        read = smooth_max(self.many if self.prompt_tokens > FEW_ROWS else 1.0, compute)
        return (self.fixed + read) / (self.fixed + 1.0)

    def outside(self, batch: int) -> float:
        return (1 + self.sequence * batch) / (1 + self.sequence * self.reference)

    def allreduce(self, batch: int) -> float:
        return (1 + self.message * batch) / (1 + self.message * self.reference)

    def _read(self, batch: int, output_tokens: float) -> float:
        context = self.prompt_tokens + output_tokens / 2
        read = self.many if batch > FEW_ROWS else 1.0
        return self.fixed + smooth_max(read, self.compute * batch) + self.kv * batch * context
