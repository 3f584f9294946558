"""The highest rate at which 32 deltas, or as many whole models, keep a promise: today's costs, simulated.

`benchmarks.serving` measured a few rates on H200s. Here the same requests, and more of them (all rates, two
seeds), go through the simulator with costs that were measured by themselves (`benchmarks.delta_steps`), and
what was served is told beside what is simulated. Six engines, each on one H200:

- deltas of 4 bits (28 in slots) and of 2 (all 32);
- whole models, 7 in slots, all others in host memory (the paper's vLLM-SCB);
- the same with 100 GiB of host memory, others on a disk. Each is read at 6 GB/s, however many at once, which
  no disk does (the simulator's fetches do not slow each other);
- the same without host memory: each load is read at 6 GB/s, one after the other, as DeltaZip says its
  baseline does. What host memory does lies between these two;
- whole models of 4 bits, all 32 on the GPU, in one grouped product. Nobody has such a kernel: it is given
  what ours reach, 75% of a copy, and prompts that cost no more than the base's.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import rehearsing
from benchmarks.reproduction.replaying import VARIANTS, replayed, requests_of
from benchmarks.reproduction.sizes import Size
from benchmarks.serving.metrics import PROMISES, highest_rates
from controlplane.simulation.world import DONE, World

MAX_ROWS, BATCHED_TOKENS = 128, 2048
DISK_GB_PER_S = 6.0
AZURE_RATES = (0.5, 1.0)  # of DeltaZip's traces
SEEDS = 2  # at most
SECONDS, DRAIN_S = 300.0, 15.0
GIB, MIB, GB = 2**30, 2**20, 1e9
COPY_BYTES_PER_S = 4.2e12
CACHED_BYTES = 0.5 * MIB  # of a token in a 7B's KV cache
MODEL_BYTES = 13.5e9

# Milliseconds, of `delta_steps_tables_slot.json` and, with 2 bits, `delta_steps_2bit.json`: a step of one row
# and of 28, of the base and with 28 deltas; prompts of 128 and 2,048 tokens; 930 tokens beside 27 who decode.
BASE_ALONE, BASE_28, DELTAS_28, DELTAS_28_2BIT = 4.62, 5.61, 25.26, 23.2
PROMPT_128, PROMPT_2048 = 13.3, 52.4
GAP_930 = 55.6
ROW_MS = (BASE_28 - BASE_ALONE) / 27
PROMPT_TOKEN_MS = (PROMPT_2048 - PROMPT_128) / (2048 - 128)
DELTA_MS, DELTA_2BIT_MS = (DELTAS_28 - BASE_28) / 28, (DELTAS_28_2BIT - BASE_28) / 28
DELTA_TOKEN_MS = (GAP_930 - 27 * (DELTA_MS + ROW_MS)) / 930 - PROMPT_TOKEN_MS
TURN_MS, QUANTUM = 6.0, 8  # of whole models: a copy within the GPU before so many steps
INT4_BYTES, INT4_SHARE = 3.24e9 + 0.26e9, 0.75  # linears, and a whole head; of a copy's speed
BESIDE_WEIGHTS_MS = BASE_ALONE - MODEL_BYTES / COPY_BYTES_PER_S * 1e3


@dataclass(frozen=True)
class Engine:
    """`variant_ms`: what each variant among the rows adds to a step; `token_ms`: what it adds to each token
    of its prompts. `base_ms`: of a step without variants."""

    slots: int
    kv_gib: float
    variant_bytes: float
    variant_ms: float
    base_ms: float = BASE_ALONE
    token_ms: float = 0.0
    prompt_base_ms: float = 0.0
    host_gib: float | None = None
    load_gb_per_s: float = 50.0


NO_BASE_MS = 1e-6
WHOLE = Engine(7, 30, MODEL_BYTES, BASE_ALONE + TURN_MS / QUANTUM, NO_BASE_MS, prompt_base_ms=BASE_ALONE)
ENGINES = {
    "deltas, 4 bits": Engine(28, 48, 2.69e9, DELTA_MS, token_ms=DELTA_TOKEN_MS),
    "deltas, 2 bits": Engine(32, 62, 1.88e9, DELTA_2BIT_MS, token_ms=DELTA_TOKEN_MS),
    "whole models": WHOLE,
    "whole models, most on disk": replace(WHOLE, host_gib=100),
    "whole models on disk": replace(WHOLE, load_gb_per_s=DISK_GB_PER_S),
    "int4 models, one product": Engine(
        32, 20, INT4_BYTES, INT4_BYTES / INT4_SHARE / COPY_BYTES_PER_S * 1e3, BESIDE_WEIGHTS_MS
    ),
}


@dataclass(frozen=True)
class Served:
    """A row of a result of `benchmarks.serving`, which of the engines here it is, and the KV cache it had."""

    file: str
    engine: str
    case: str
    as_engine: str
    kv_gib: float
    seconds: float
    drain_s: float


NEW, OLD, MERGED = "serving_rates_2bit.json", "serving_rates.json", "serving_rates_merged_rows.json"
SERVED = (
    Served(NEW, "ours", "uniform@8", "deltas, 2 bits", 62, 300, 15),
    Served(NEW, "ours", "uniform@6", "deltas, 2 bits", 62, 240, 12),
    Served(NEW, "ours", "zipf@10", "deltas, 2 bits", 62, 240, 12),
    Served(NEW, "baseline", "uniform@1", "whole models", 30, 300, 15),
    Served(NEW, "baseline", "zipf@2", "whole models", 30, 300, 15),
    Served(OLD, "baseline", "uniform@1", "whole models", 30, 60, 10),
    Served(OLD, "baseline", "zipf@1", "whole models", 30, 60, 10),
    Served(OLD, "baseline", "uniform@1.5", "whole models", 30, 60, 10),
    Served(OLD, "baseline", "zipf@2", "whole models", 30, 60, 10),
    Served(OLD, "ours", "uniform@6", "deltas, 4 bits", 38, 50, 10),
    Served(OLD, "ours", "zipf@6", "deltas, 4 bits", 38, 50, 10),
    Served(OLD, "ours", "zipf@8", "deltas, 4 bits", 38, 50, 10),
    Served(MERGED, "ours", "uniform@7", "deltas, 4 bits", 45, 50, 10),
    Served(MERGED, "ours", "uniform@8", "deltas, 4 bits", 45, 50, 10),
    Served(MERGED, "ours", "uniform@9", "deltas, 4 bits", 45, 50, 10),
    Served(MERGED, "ours", "zipf@10", "deltas, 4 bits", 45, 50, 10),
)


def scenario(engine: Engine) -> dict[str, Any]:
    """Without its traffic, as a scenario's file has it."""
    steps = {
        "base_ms": engine.base_ms,
        "row_ms": ROW_MS,
        "kv_token_us": CACHED_BYTES / COPY_BYTES_PER_S * 1e6,
        "prompt_base_ms": engine.prompt_base_ms,
        "prompt_token_ms": PROMPT_TOKEN_MS,
    }
    group = {
        "count": 1,
        "steps": steps,
        "max_rows": MAX_ROWS,
        "batched_tokens": BATCHED_TOKENS,
        "kv_tokens": int(engine.kv_gib * GIB / CACHED_BYTES),
        "slots": engine.slots,
        "load_gb_per_s": engine.load_gb_per_s,
        "fetch_gb_per_s": DISK_GB_PER_S,
    }
    variants = {
        "kind": "sparse_delta",  # the simulator has no kind for whole models; none of its figures is used
        "count": VARIANTS,
        "mib": engine.variant_bytes / MIB,
        "variant_ms": engine.variant_ms,
        "prompt_token_us": engine.token_ms * 1e3,
    }
    return {
        "cluster": {"groups": [group]},
        "engine": {"host_gib": engine.host_gib},
        "gateway": {"max_ongoing": 10_000, "refuse": False},
        "variants": [variants],
        "policies": ["most-idle"],
        "horizon_s": 1e6,
    }


def promises(data: Path, size: Size) -> list[dict[str, Any]]:
    """What is simulated, then what was served beside what is simulated of it, then the highest rates."""
    kinds = [f"{kind}@{rate:g}" for kind in ("uniform", "zipf") for rate in size.promise_rates]
    cases = [f"{case}:seed={seed}" for case in kinds for seed in range(1, 1 + min(size.seeds, SEEDS))]
    cases += [f"azure@{rate}" for rate in AZURE_RATES]
    seconds = min(SECONDS, size.horizon_s)
    rows = []
    for case in cases:
        asked = requests_of(data, case, seconds)
        for name, engine in ENGINES.items():
            found = figures(replayed(asked, scenario(engine)), DRAIN_S)
            rows.append({"engine": name, "case": case, "requests": len(asked), **found})
    highest = [{"highest_of": "all cases", **row} for row in highest_rates(rows)]
    return [*rows, *_beside_what_was_served(data, size), *highest]


def _beside_what_was_served(data: Path, size: Size) -> Iterator[dict[str, Any]]:
    for served in SERVED[: size.models]:
        told = json.loads((rehearsing.RESULTS / served.file).read_text())["rows"]
        cases = {(row["engine"], row["case"]): row for row in told if "requests" in row}
        row = cases[served.engine, served.case]
        measured = {name: row[name] for name in ("ttft_p90_s", "tpot_p90_s", "unfinished")}
        asked = requests_of(data, served.case, served.seconds)
        engine = replace(ENGINES[served.as_engine], kv_gib=served.kv_gib)
        simulated = figures(replayed(asked, scenario(engine)), served.drain_s)
        about = {"served_as": served.as_engine, "served_case": served.case, "seconds": served.seconds}
        yield {**about, "measured": measured, "simulated": simulated, "agree": agree(measured, simulated)}


def agree(measured: dict[str, float], simulated: dict[str, float]) -> dict[str, bool]:
    """Whether both keep each promise, or both break it."""

    def kept(found: dict[str, float], goals: tuple[float, float]) -> bool:
        return found["ttft_p90_s"] <= goals[0] and found["tpot_p90_s"] <= goals[1]

    return {promise: kept(measured, goals) == kept(simulated, goals) for promise, goals in PROMISES.items()}


def figures(world: World, drain_s: float) -> dict[str, float]:
    """As `benchmarks.serving.metrics` has them of what was served, but TPOT of those that ended in time."""
    arrival_s, outcomes = world.asked.arrival_s, world.outcomes
    until_s = float(arrival_s[-1]) + drain_s
    ended_s = np.where(outcomes.state == DONE, outcomes.end_s, np.inf)
    first_s = np.minimum(outcomes.first_s, until_s)
    done = (ended_s <= until_s) & (world.asked.output > 1)
    tpot_s = (ended_s[done] - first_s[done]) / (world.asked.output[done] - 1)
    return {
        "ttft_p90_s": round(float(np.percentile(first_s - arrival_s, 90)), 4),
        "tpot_p90_s": round(float(np.percentile(tpot_s, 90)), 5),
        "unfinished": int((ended_s > until_s).sum()),
    }
