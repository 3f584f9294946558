"""The simulated systems: clusters, adapters, and requests. Every figure names its source.

The popularity of adapters is synthetic (Zipf): the trace that CaraServe used (Azure Functions) is not at
hand. So are lengths: lognormal, about as long as instructions and their answers.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import numpy as np
import numpy.typing as npt

from controlplane.routing.snapshot import ELSEWHERE, IN_HOST_MEMORY
from controlplane.simulation.world import ASKED
from profiler.compiled import Records, records
from profiler.step_time.records import KIND_NUMBERS, PREFILL_KNOTS, STEP_MODEL, VARIANT, rank_class

RANKS = (8, 16, 32, 64, 128)  # each as likely
PROMPT, OUTPUT = (64.0, 0.6), (100.0, 0.7)  # tokens: medians, and the deviation of their logarithm
LONGEST = 512


@dataclasses.dataclass(frozen=True)
class Machine:
    """A server: a decode step takes `step_s[n]` with n rows, between those given, and `row_rank_s` more for
    each unit of rank of each row, of its own rank or of the batch's largest (`padded`)."""

    name: str
    rows: tuple[int, ...]
    step_s: tuple[float, ...]
    row_rank_s: float
    padded: bool
    prompt_token_s: float
    context_s: float
    kv_tokens: int
    max_rows: int
    slots: int
    load_bytes_per_s: float
    fetch_bytes_per_s: float
    memory_bytes_per_s: float  # what a delta's kernel reads


# CaraServe's A10 with Llama-2-7B. Its toy example (section 2.3) has four decode steps, two for each kernel:
# 24 rows of rank 32 and 16 of rank 64 take 34.8 and 35.8 ms padded (BGMV), 35.3 and 35.9 ms not (MBGMV); its
# model is linear in `count x largest rank`, or in the sum of ranks. So 1.0 ms, or 0.6 ms, for 256 units of
# rank, and 31.8 or 33.5 ms without any. KV cache: 24 GB less the weights and some room, 0.5 MiB a token. A
# prompt's token takes 13.5 GFLOP at 60% of 125 TFLOP/s. PCIe 4 at 20 GB/s; the network has 25 Gbit/s.
BGMV = Machine(
    name="bgmv",
    rows=(1, 512),
    step_s=(31.8e-3, 31.8e-3),
    row_rank_s=1.0e-3 / 256,
    padded=True,
    prompt_token_s=0.18e-3,
    context_s=0.0,
    kv_tokens=10_000,
    max_rows=128,
    slots=40,
    load_bytes_per_s=20e9,
    fetch_bytes_per_s=3.1e9,
    memory_bytes_per_s=300e9,
)
MBGMV = dataclasses.replace(
    BGMV, name="mbgmv", step_s=(33.5e-3, 33.5e-3), row_rank_s=0.6e-3 / 256, padded=False
)
# One H200 with Llama-2-7B and our kernels (benchmarks/results/gpu_lora.json: the base, and what 128 rows of
# rank 64 add; kernels_sparse_delta.json: a delta's bytes at half of a copy's 4.2 TB/s). 128 GB less weights
# and 16 slots of 3 GB are 66 GB of KV cache. PCIe 5 at 50 GB/s; files at 5 GB/s.
H200 = Machine(
    name="h200",
    rows=(1, 8, 32, 128, 512),
    step_s=(4.6e-3, 4.9e-3, 5.6e-3, 8.8e-3, 21.6e-3),
    row_rank_s=1.2e-3 / (128 * 64),
    padded=False,
    prompt_token_s=13.5e9 / 500e12,
    context_s=0.5 * 2**20 / 4.0e12,
    kv_tokens=125_000,
    max_rows=256,
    slots=16,
    load_bytes_per_s=50e9,
    fetch_bytes_per_s=5e9,
    memory_bytes_per_s=2.1e12,
)


@dataclasses.dataclass(frozen=True)
class Mix:
    """Shares of kinds among the adapters; LoRA is the rest."""

    delta: float = 0.0
    boft: float = 0.0
    delta_bytes: float = 3e9


@dataclasses.dataclass(frozen=True)
class Scenario:
    """`drift_s`: how often half of the adapters trade their popularity (0: never). Promises in seconds;
    `loose_share` of the adapters promise `loose` times as long."""

    name: str
    machine: Machine
    groups: int = 60
    variants: int = 40_000
    mix: Mix = Mix()
    zipf: float = 1.0
    drift_s: float = 0.0
    tpot_s: float = 50e-3
    ttft_s: float = 1.0
    loose_share: float = 0.0
    loose: float = 2.0
    warm_s: float = 25.0
    measured_s: float = 30.0


def step_models(machine: Machine) -> Records:
    """[1]."""
    model = records(STEP_MODEL, 1)
    rows = np.arange(model.decode_s.shape[1])
    model.decode_s = np.interp(rows, machine.rows, machine.step_s)
    most = 2048
    tokens = np.arange(PREFILL_KNOTS + 1) * (most / PREFILL_KNOTS)
    model.prefill_s = np.maximum(machine.step_s[0], tokens * machine.prompt_token_s)
    model.prefill_grain = most / PREFILL_KNOTS
    model.context_s = machine.context_s
    model.padded_s = machine.row_rank_s if machine.padded else 0.0
    model.batched_tokens, model.kv_tokens = most, machine.kv_tokens
    model.max_rows, model.slots = machine.max_rows, machine.slots
    return model


def variant_records(scenario: Scenario, rng: np.random.Generator) -> Records:
    """[V]; the first is the base, which gets no request."""
    machine, mix, count = scenario.machine, scenario.mix, scenario.variants
    made = records(VARIANT, count + 1)
    made.kind, made.weight = -1, 1.0
    ranks = rng.choice(RANKS, count)
    kinds = rng.choice(3, count, p=[1.0 - mix.delta - mix.boft, mix.delta, mix.boft])
    lora, delta, boft = (kinds == number for number in range(3))
    own = made[1:]
    own.kind[lora] = KIND_NUMBERS["lora"]
    own.rank[lora] = ranks[lora]
    own.rank_class[lora] = [rank_class(int(rank)) for rank in ranks[lora]]
    own.bytes[lora] = ranks[lora] * (100 * 2**20 / 64)  # CaraServe, section 2.3: 100 MiB for rank 64
    if not machine.padded:
        own.row_s[lora] = machine.row_rank_s * ranks[lora]
    own.kind[delta] = KIND_NUMBERS["sparse_delta"]
    own.bytes[delta] = mix.delta_bytes
    own.variant_s[delta] = mix.delta_bytes / machine.memory_bytes_per_s
    own.token_s[delta] = machine.prompt_token_s
    # Rotating the inputs of seven layers of 32 blocks of 32: 1.5 us an adapter (kernels_boft.json), 4 times
    # 32.
    own.kind[boft] = KIND_NUMBERS["boft"]
    own.bytes[boft] = 50e6
    own.variant_s[boft] = 1.5e-6 * 4 * 32
    own.load_s[:] = own.bytes / machine.load_bytes_per_s
    own.fetch_s[:] = own.bytes / machine.fetch_bytes_per_s
    return made


def where_at_first(scenario: Scenario, variants: Records) -> npt.NDArray[np.int32]:
    """[V, G]: adapters are in every host's memory (CaraServe); deltas are fetched."""
    at = np.where(variants.bytes < 1e9, IN_HOST_MEMORY, ELSEWHERE).astype(np.int32)
    return np.broadcast_to(at[:, None], (len(variants), scenario.groups)).copy()


def requests(scenario: Scenario, variants: Records, rate: float, rng: np.random.Generator) -> Records:
    """Poisson arrivals until the end of the measured time, `rate` a second.

    The n-th request is the same at every rate with the same seed, but for when it comes: so no other noise
    lies between rates.
    """
    span_s = scenario.warm_s + scenario.measured_s
    gaps, places, prompts, outputs, others = rng.spawn(5)
    most = int(rate * span_s + 10 * (rate * span_s) ** 0.5 + 10)
    arrival_s = np.cumsum(gaps.exponential(1.0, most)) / rate
    count = int(np.searchsorted(arrival_s, span_s))
    asked = records(ASKED, count)
    asked.arrival_s = arrival_s[:count]
    asked.variant = 1 + _popular(scenario, asked.arrival_s, places.random(most)[:count], others)
    asked.prompt = _lengths(PROMPT, most, prompts)[:count]
    asked.output = _lengths(OUTPUT, most, outputs)[:count]
    asked.expected = mean_output()
    loose = others.random(scenario.variants + 1) < scenario.loose_share
    factor = np.where(loose[asked.variant], scenario.loose, 1.0)
    asked.tpot_s, asked.ttft_s = scenario.tpot_s * factor, scenario.ttft_s * factor
    return asked


def _popular(
    scenario: Scenario, arrival_s: Any, chance: Any, rng: np.random.Generator
) -> npt.NDArray[np.int64]:
    """Which adapter each request asks, for a `chance` of 0 to 1 each: Zipf over an order that changes when
    popularity drifts."""
    count = scenario.variants
    weights = 1.0 / np.arange(1, count + 1) ** scenario.zipf
    place = np.searchsorted(np.cumsum(weights) / weights.sum(), chance)
    place = np.minimum(place, count - 1)
    order = rng.permutation(count)
    epochs = (arrival_s / scenario.drift_s).astype(int) if scenario.drift_s else np.zeros(len(place), int)
    asked = np.empty(len(place), np.int64)
    for epoch in range(int(epochs.max(initial=0)) + 1):
        if epoch:
            moved = rng.permutation(count)[: count // 2]
            order[np.sort(moved)] = order[moved]
        asked[epochs == epoch] = order[place[epochs == epoch]]
    return asked


def _lengths(of: tuple[float, float], count: int, rng: np.random.Generator) -> npt.NDArray[np.int64]:
    return np.clip(rng.lognormal(math.log(of[0]), of[1], count), 2, LONGEST).astype(int)


@functools.cache
def mean_output() -> float:
    """The gateway's expectation of every request: it cannot know more."""
    return float(_lengths(OUTPUT, 100_000, np.random.default_rng(0)).mean())
