"""The highest rate at which 32 deltas, or as many whole models, keep a promise, simulated.

    python -m benchmarks.serving.simulated --data TRACES --out benchmarks/results/serving_simulated.json

`benchmarks.serving` measured a few rates on H200s. The simulator serves the same requests at all rates, with
two seeds, and with the step costs that `benchmarks.delta_steps` measured. The result also has the served rows
next to what is simulated of them. TRACES holds Azure's `AzureLLMInferenceTrace_conv.csv` of 2023 and
DeltaZip's `deltazip-azure-ar0.5.jsonl` and `-ar1.0.jsonl`. Six engines, each on one H200:

- deltas of 4 bits (28 in slots) and of 2 (all 32);
- whole models, 7 in slots, all others in host memory (the paper's vLLM-SCB);
- the same with 100 GiB of host memory, others on a disk. Each load is read at 6 GB/s, however many load at
  once, which no disk does (the simulator's loads do not slow each other);
- the same without host memory: each load is read at 6 GB/s, one after the other, as DeltaZip says of its
  baseline. What host memory does lies between these two;
- whole models of 4 bits, all 32 on the GPU, in one grouped product. No such kernel exists: it is given
  75% of a copy's rate, as Ostinato's kernels reach, and prompts that cost no more than the base's.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import plot_style, rehearsing
from benchmarks.serving.metrics import PROMISES, highest_rates
from benchmarks.serving.workload import Request, azure_lengths, parse_case, synthetic, trace_requests
from controlplane.simulation.experiment import Case, Experiment
from controlplane.simulation.forms import ScenarioForm
from controlplane.simulation.world import DONE, World
from controlplane.traffic.request_terms import BYTES_PER_TOKEN

CONVERSATIONS = "AzureLLMInferenceTrace_conv.csv"
DELTAZIP = {0.5: "deltazip-azure-ar0.5.jsonl", 1.0: "deltazip-azure-ar1.0.jsonl"}
VARIANTS, MAX_MODEL_LEN, SEED = 32, 2048, 1
RATES = (0.25, 0.5, 0.75, 1, 1.25, 1.5, 2, 2.5, 3, 4, 5, 6, 7, 8, 9, 10, 12)
MAX_ROWS, BATCHED_TOKENS = 128, 2048
DISK_GB_PER_S = 6.0
SECONDS, DRAIN_S = 300.0, 15.0
GIB, MIB, GB = 2**30, 2**20, 1e9
COPY_BYTES_PER_S = 4.2e12
CACHED_BYTES = 0.5 * MIB  # of a token in a 7B's KV cache
MODEL_BYTES = 13.5e9

# Milliseconds, of `delta_steps_tables_slot.json` and, with 2 bits, `delta_steps_2bit.json`: a step of one row
# and of 28, of the base and with 28 deltas; prompts of 128 and 2,048 tokens; 930 tokens with 27 rows that
# decode.
BASE_ALONE, BASE_28, DELTAS_28, DELTAS_28_2BIT = 4.62, 5.61, 25.26, 23.2
PROMPT_128, PROMPT_2048 = 13.3, 52.4
GAP_930 = 55.6
ROW_MS = (BASE_28 - BASE_ALONE) / 27
PROMPT_TOKEN_MS = (PROMPT_2048 - PROMPT_128) / (2048 - 128)
DELTA_MS, DELTA_2BIT_MS = (DELTAS_28 - BASE_28) / 28, (DELTAS_28_2BIT - BASE_28) / 28
DELTA_TOKEN_MS = (GAP_930 - 27 * (DELTA_MS + ROW_MS)) / 930 - PROMPT_TOKEN_MS
TURN_MS, QUANTUM = 6.0, 8  # whole models: a copy within the GPU every QUANTUM steps
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


def requests_of(data: Path, name: str, seconds: float) -> list[Request]:
    """The requests of a case of `benchmarks.serving`; `data` holds the traces. Raises ValueError for another
    name."""
    case = parse_case(name)
    if case.kind == "azure":
        return trace_requests((data / DELTAZIP[case.rate]).read_text(), VARIANTS, MAX_MODEL_LEN)
    lengths = azure_lengths((data / CONVERSATIONS).read_text(), MAX_MODEL_LEN)
    return synthetic(case, seconds, VARIANTS, lengths, SEED)


def replayed(asked: Sequence[Request], scenario: dict[str, Any]) -> World:
    """The simulator reads the requests as a trace. `scenario`: a scenario's file without its traffic."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "asked.jsonl").write_text("".join(map(_line, asked)))
        traffic = {"arrivals": "trace", "file": "asked.jsonl"}
        form = ScenarioForm.model_validate({**scenario, "traffic": traffic})
        world, _ = Experiment(form, Path(folder)).watched(Case("most-idle", None, 0, (1,)))
    return world


def _line(request: Request) -> str:
    """The trace's models are the variants; a request for the base asks for one more variant."""
    fields = asdict(request)
    prompt = "x" * (BYTES_PER_TOKEN * fields["prompt_tokens"])
    model = f"delta-{fields['variant'] or VARIANTS}"
    entry = {"timestamp": fields["at_s"], "model": model, "prompt": prompt}
    return json.dumps(entry | {"max_tokens": fields["output_tokens"]}) + "\n"


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


@dataclass(frozen=True)
class Size:
    """Simulate the first `served` of the served rows."""

    rates: tuple[float, ...] = RATES
    seeds: int = 2
    seconds: float = SECONDS
    served: int = 100


def promises(data: Path, size: Size) -> list[dict[str, Any]]:
    """What is simulated, then served rows next to what is simulated of them, then the highest rates."""
    kinds = [f"{kind}@{rate:g}" for kind in ("uniform", "zipf") for rate in size.rates]
    cases = [f"{case}:seed={seed}" for case in kinds for seed in range(1, 1 + size.seeds)]
    cases += [f"azure@{rate}" for rate in DELTAZIP]
    seconds = size.seconds
    rows = []
    for case in cases:
        asked = requests_of(data, case, seconds)
        for name, engine in ENGINES.items():
            found = figures(replayed(asked, scenario(engine)), DRAIN_S)
            rows.append({"engine": name, "case": case, "requests": len(asked), **found})
    highest = [{"highest_of": "all cases", **row} for row in highest_rates(rows)]
    return [*rows, *_next_to_served(data, size.served), *highest]


def _next_to_served(data: Path, count: int) -> Iterator[dict[str, Any]]:
    for served in SERVED[:count]:
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


Rows = Sequence[dict[str, Any]]


def draw(rows: Rows, path: Path) -> None:
    """TTFT above, TPOT below, of 90% of requests, with both promises; a column for each popularity. Lines are
    simulated, the mean of the seeds; rings were served."""
    simulated = [(row, parse_case(row["case"])) for row in rows if "ttft_p90_s" in row]
    served = [(row, parse_case(row["served_case"])) for row in rows if "served_case" in row]
    figure, axes = plot_style.new(2, 2, (4.6, 3.2), sharex=True)
    engines = _in_order(row["engine"] for row, _ in simulated)
    for line, (name, title) in enumerate((("ttft_p90_s", "TTFT"), ("tpot_p90_s", "TPOT"))):
        for column, kind in enumerate(("uniform", "zipf")):
            axis = axes[line, column]
            for number, engine in enumerate(engines):
                own = [(row, case) for row, case in simulated if (row["engine"], case.kind) == (engine, kind)]
                rates = _in_order(case.rate for _, case in own)
                means = [_mean(row[name] for row, case in own if case.rate == rate) for rate in rates]
                axis.plot(rates, means, color=f"C{number}", label=engine)
                rings = [
                    (case.rate, row["measured"][name])
                    for row, case in served
                    if (row["served_as"], case.kind) == (engine, kind)
                ]
                axis.plot(
                    *zip(*rings, strict=True) if rings else ([], []), "o", mfc="none", color=f"C{number}"
                )
            for goals in PROMISES.values():
                axis.axhline(goals[line], color="0.6", linestyle=":")
            _log(axis)
            axis.set_title(kind if line == 0 else "")
            axis.set_xlabel("requests a second" if line == 1 else "")
            axis.set_ylabel(f"{title}, 90% within, s" if column == 0 else "")
    figure.suptitle("32 fine-tunes on an H200, simulated; rings: served")
    plot_style.legend(figure, axes)
    plot_style.save(figure, path)


def _log(axis: Any) -> None:
    axis.set_xscale("log")
    axis.set_yscale("log")
    plot_style.plain_log(axis.xaxis, [0.5, 1, 2, 4, 8])
    plot_style.plain_log(axis.yaxis)


def _in_order(values: Iterable[Any]) -> list[Any]:
    return list(dict.fromkeys(values))


def _mean(values: Iterable[float]) -> float:
    known = list(values)
    return statistics.fmean(known) if known else float("nan")


def compute(data: Path, out: Path, size: Size, command: str) -> None:
    began = time.process_time()
    rows = promises(data, size)
    host = {"cores": len(os.sched_getaffinity(0)), "python": platform.python_version()}
    took_s = round(time.process_time() - began, 1)
    rehearsing.write_result(out, {"command": command, "host": host, "cpu_s": took_s, "rows": rows})
    draw(rows, out.with_suffix(".png"))


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--data", type=Path, default=Path("traces"))
    parser.add_argument("--seeds", type=int, default=2)
    asked = parser.parse_args(argv)
    command = rehearsing.command("benchmarks.serving.simulated", argv)
    compute(asked.data, asked.out, Size(seeds=asked.seeds), command)


def rehearse(folder: Path) -> None:
    """Traces of a few requests: one seed, one rate, some seconds."""
    lines = ["TIMESTAMP,ContextTokens,GeneratedTokens"]
    lines += [f"2023-11-16 18:15:{at:02d}.0000000,{100 + at},{2 + at % 4}" for at in range(40)]
    (folder / CONVERSATIONS).write_text("\n".join(lines) + "\n")
    asked = [
        {"timestamp": n / 2, "model": f"delta-{n % 3 + 1}", "prompt": "Who are you?", "max_tokens": 5 + n}
        for n in range(8)
    ]
    for name in DELTAZIP.values():
        (folder / name).write_text("".join(json.dumps(one) + "\n" for one in asked))
    out = folder / "serving_simulated.json"
    compute(folder, out, Size((1.0,), 1, 20.0, 3), "rehearsal")
    assert any("served_case" in row for row in rehearsing.check(out, "rows")["rows"])
    assert out.with_suffix(".png").stat().st_size > 1000


if __name__ == "__main__":
    rehearsing.run(main, rehearse)
