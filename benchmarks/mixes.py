"""Estimates of mixes against an engine that serves them: base, LoRA, 4-bit deltas and BOFT in one batch.

    python -m benchmarks.mixes --out RESULT.json [--layers 32] [--part measure|serve] [--lines LINES.jsonl]

It runs on one GPU, without Ray. First a profile is measured as registering a base measures it (the same plan,
processes and bounds); its lines go to --lines. Then an engine is started like one that is deployed for
variants of all kinds, of the whole model with made-up weights. Bursts of requests that ask a mix in turn are
sent to it: the clients' figures are compared with the profile's estimates. There is no request path: the
engine alone is estimated too. In a `closed` loop each client sends its next request when its last has ended;
estimates are of bursts, and such rows are for comparison. Mixes with a kind that the lines have no steps of
are left out.

16 of a 7B's 32 layers take about seven minutes for both parts on an H200, 32 each about six. Files of the
variants take 9 GB below --work with 32 layers.
"""

from __future__ import annotations

import itertools
import os
import shutil
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import gpu_engine, rehearsing
from benchmarks.rehearsal_engine import base_of
from benchmarks.serving.engines import delta_bytes, set_environment
from profiler.checkpoint import read_model
from profiler.measurements import Measurement, Point, Setting, SyntheticVariant, Timing, from_lines
from profiler.physical.calibrating import calibrate
from profiler.physical.calibration import Calibration
from profiler.predicting.predict import Ground, Prediction, predict
from profiler.profiling_plan import Reach, profiling_plan
from profiler.types import DeviceRates, Interval, ModelSpec, Plan, Workload
from profiler.variants.synthetic import synthetic_spec
from profiler.variants.types import VariantKind, launched_kinds
from workers.group.cuda_graphs import compilation
from workers.group.vllm_arguments import RANK_PLUGIN
from workers.measuring import synthetic_variants
from workers.measuring.timing import burst, prompt_of, run, timing
from workers.variant_config import VariantConfig

SHAPE = gpu_engine.LLAMA_7B
MAX_LEN, STEP_TOKENS, SEQUENCES, SLOTS, RANK = 2048, 2048, 64, 8, 16
GIB, MIB = 1 << 30, 1 << 20
PROFILE_BYTES = 8 * GIB  # as registering has it
KV_GIB, ALIGNED = 40.0, 1.02
PER_CLIENT = 3  # requests of each client in a closed loop
LORA = tuple(SyntheticVariant("lora", rank=RANK, seed=seed) for seed in range(2))
DELTA = tuple(SyntheticVariant("sparse_delta", bits=4, seed=seed) for seed in range(4))
BOFT = (SyntheticVariant("boft", factors=1, block_size=8),)
Mix = tuple[SyntheticVariant | None, ...]
MIXES: dict[str, Mix] = {
    "base": (None,),
    "base, LoRA, delta": (None, LORA[0], DELTA[0]),
    "base, LoRA, delta, BOFT": (None, LORA[0], DELTA[0], BOFT[0]),
    "2 LoRAs, 4 deltas": (*LORA, *DELTA),
}
LOADS = (
    Workload(8, 128, 64),
    Workload(32, 128, 64),
    Workload(64, 128, 64),
    Workload(32, 512, 64),
    Workload(64, 1024, 64),
)


@dataclass(frozen=True)
class Means:
    """The clients' figures of one load: means over the requests, seconds; `latency_s` until a burst's last
    one ends, or of the mean request of a closed loop."""

    ttft_s: float
    tpot_s: float
    latency_s: float
    tokens_per_s: float


def means_of(load: Workload, tokens: Sequence[Sequence[float]], latency_s: float, over_s: float) -> Means:
    """`tokens`: when each one came, since its request was sent, by request; all of them within `over_s`."""
    return Means(
        statistics.mean(times[0] for times in tokens),
        statistics.mean((times[-1] - times[0]) / max(1, len(times) - 1) for times in tokens),
        latency_s,
        sum(map(len, tokens)) / over_s,
    )


def of_burst(llm: Any, load: Workload, asked: Sequence[Any], seed: int) -> Means:
    turns = [asked[n % len(asked)] for n in range(load.batch)]
    seen = burst(llm, turns, load.input_tokens, load.output_tokens, seed)
    return means_of(load, seen.tokens, seen.end, seen.end)


def of_closed_loop(llm: Any, load: Workload, asked: Sequence[Any], seed: int) -> Means:
    """Each client sends PER_CLIENT requests, one after the other."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    sampling = SamplingParams(
        max_tokens=load.output_tokens,
        temperature=0,
        ignore_eos=True,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
    )
    engine, numbers = llm.llm_engine, itertools.count()
    sent: dict[str, tuple[int, float]] = {}
    tokens: dict[str, list[float]] = {}

    def send(client: int) -> None:
        number = next(numbers)
        name = f"closed-{seed}-{number}"
        prompt = {"prompt_token_ids": prompt_of(load.input_tokens, seed * 100003 + number)}
        sent[name], tokens[name] = (client, time.perf_counter()), []
        engine.add_request(name, prompt, sampling, lora_request=asked[number % len(asked)])

    began_s, left = time.perf_counter(), [PER_CLIENT - 1] * load.batch
    for client in range(load.batch):
        send(client)
    while engine.has_unfinished_requests():
        for output in engine.step():
            client, sent_s = sent[output.request_id]
            now_s = time.perf_counter() - sent_s
            tokens[output.request_id] += [now_s] * len(output.outputs[0].token_ids)
            if output.finished and left[client]:
                left[client] -= 1
                send(client)
    whole_s = time.perf_counter() - began_s
    seen = list(tokens.values())
    return means_of(load, seen, statistics.mean(times[-1] for times in seen), whole_s)


@dataclass(frozen=True)
class Estimator:
    """The estimate from a profile's lines, as `ostinato estimate` makes it for an engine alone."""

    spec: ModelSpec
    calibration: Calibration
    launched: tuple[str, ...]

    def of(self, mix: Mix, load: Workload) -> Prediction:
        rates = DeviceRates(1.0, 1.0)  # of the device that was measured: nothing is scaled by them
        plan = Plan(1, (self.spec.num_layers,), "none", MAX_LEN, 0, SLOTS, RANK, batched_tokens=STEP_TOKENS)
        specs = [None if member is None else synthetic_spec(self.spec, member) for member in mix]
        ground = Ground(self.spec, (rates,), self.calibration, launched=self.launched)
        return predict(ground, plan, load, specs if any(specs) else ())


def rows_of(
    name: str, how: str, load: Workload, estimate: Prediction, seen: Means
) -> Iterator[dict[str, Any]]:
    figures = (
        ("TTFT, ms", estimate.ttft_s, 1e3, seen.ttft_s),
        ("TPOT, ms", estimate.tpot_s, 1e3, seen.tpot_s),
        ("latency, ms", estimate.latency_s, 1e3, seen.latency_s),
        ("tokens/s", estimate.tokens_per_s, 1.0, seen.tokens_per_s),
    )
    about = {"mix": name, "how": how, "batch": load.batch, "input": load.input_tokens}
    for what, interval, unit, measured in figures:
        yield {**about, "what": what, **_compared(interval, unit, measured)}


def _compared(interval: Interval, unit: float, measured: float) -> dict[str, Any]:
    ends = {end: round(getattr(interval, end) * unit, 3) for end in ("value", "low", "high")}
    error = measured / interval.value - 1
    return {
        **ends,
        "measured": round(measured * unit, 3),
        "off": round(error, 4),
        "inside": interval.holds(measured),
    }


def compared(
    llm: Any,
    estimator: Estimator,
    requests: dict[SyntheticVariant, Any],
    loads: Sequence[Workload],
    repeats: int,
) -> Iterator[dict[str, Any]]:
    """Rows of all mixes and loads; a burst's are medians."""
    seeds = itertools.count(10)
    for name, mix in MIXES.items():
        if not {member for member in mix if member} <= requests.keys():
            continue
        asked = [None if member is None else requests[member] for member in mix]
        burst(llm, asked, 16, 2, next(seeds))  # all are in their slots
        for load in loads:
            estimate = estimator.of(mix, load)
            burst(llm, [asked[n % len(asked)] for n in range(load.batch)], load.input_tokens, 2, next(seeds))
            seen = [of_burst(llm, load, asked, next(seeds)) for _ in range(repeats)]
            yield from rows_of(name, "burst", load, estimate, _medians(seen))
            if load.input_tokens * load.batch <= STEP_TOKENS * 4:
                yield from rows_of(
                    name, "closed", load, estimate, of_closed_loop(llm, load, asked, next(seeds))
                )


def _medians(seen: Sequence[Means]) -> Means:
    each = zip(*((m.ttft_s, m.tpot_s, m.latency_s, m.tokens_per_s) for m in seen), strict=True)
    return Means(*map(statistics.median, each))


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Figures of bursts: how many were inside, by figure and in all, and their median distance."""
    bursts = [row for row in rows if row["how"] == "burst"]
    found = {}
    for what in (*dict.fromkeys(row["what"] for row in bursts), "all"):
        own = [row for row in bursts if what in (row["what"], "all")]
        found[what] = {
            "figures": len(own),
            "inside": round(sum(row["inside"] for row in own) / len(own), 3),
            "median_off": round(statistics.median(abs(row["off"]) for row in own), 4),
        }
    return found


# --- the profile, and the engine ----------------------------------------------------------------------


def shape_of(layers: int) -> dict[str, int]:
    return {**SHAPE, "num_hidden_layers": layers}


def measure(base: Path, work: Path, seconds: float, lines_file: Path) -> None:
    """Write a profile's lines as they come, as it is measured when a base is registered, on one GPU."""
    from workers.measuring.engine_runs import carry_out
    from workers.measuring.request import MeasureRequest

    spec = read_model(base)
    reach = Reach(
        False, 1, PROFILE_BYTES, MAX_LEN, SEQUENCES, STEP_TOKENS, max_lora_rank=RANK, max_variants=SLOTS
    )
    request = MeasureRequest(
        folder=base,
        scratch=work / "profile",
        engine_runs=profiling_plan(spec, reach),
        known=(),
        device_kind="gpu",
        devices=(0,),
        device_bytes=PROFILE_BYTES,
        dtype="bfloat16",
        max_model_len=MAX_LEN,
        seconds=seconds,
    )
    began_s = time.monotonic()
    with lines_file.open("w") as file:
        for line in carry_out(request):
            print(line, file=file, flush=True)
            print(f"{time.monotonic() - began_s:.0f} s: {line[:240]}", flush=True)


def measured_kinds(lines: Sequence[str]) -> set[str]:
    """Kinds of variants that a profile's lines have steps of."""
    timings = (line for line in from_lines(lines, "a profile") if isinstance(line, Timing))
    return {member.kind for timing in timings for member in timing.point.mix}


def write_variants(base: Path, work: Path, kinds: set[str]) -> dict[SyntheticVariant, Path]:
    """Whole ones of these kinds, each with the files of the first of its kind."""
    spec, written = read_model(base), dict[SyntheticVariant, Path]()
    members = (member for mix in MIXES.values() for member in mix)
    for variant in dict.fromkeys(member for member in members if member and member.kind in kinds):
        folder = work / f"{variant.kind}-{variant.seed}"
        first = next((known for known in written if known.kind == variant.kind), None)
        if not folder.exists() and first is None:
            synthetic_variants.write(variant, spec, spec.num_layers, folder)
        elif not folder.exists() and first is not None:
            shutil.copytree(written[first], folder, copy_function=os.link)
        written[variant] = folder
    return written


def requested(folders: dict[SyntheticVariant, Path]) -> dict[SyntheticVariant, Any]:
    from vllm.lora.request import LoRARequest

    return {
        variant: LoRARequest(folder.name, 8000 + number, str(folder))
        for number, (variant, folder) in enumerate(folders.items())
    }


def start(base: Path, folders: dict[SyntheticVariant, Path], kinds: tuple[str, ...]) -> Any:
    """vLLM as it is deployed for such variants, whose core is a process of its own."""
    set_environment()
    from vllm import LLM

    arena = int(ALIGNED * sum(map(delta_bytes, folders.values()))) + 256 * MIB
    config = VariantConfig(SLOTS, arena, 2 * arena, RANK, kinds=kinds)
    return LLM(
        model=str(base),
        dtype="bfloat16",
        load_format="dummy",
        skip_tokenizer_init=True,
        enable_prefix_caching=False,
        max_model_len=MAX_LEN,
        max_num_seqs=SEQUENCES,
        max_num_batched_tokens=STEP_TOKENS,
        disable_log_stats=True,
        enable_lora=True,
        max_lora_rank=RANK,
        max_loras=SLOTS,
        scheduler_cls="workers.engine.scheduler.make_scheduler",
        worker_extension_cls=RANK_PLUGIN,
        additional_config=config.as_json(),
        compilation_config=compilation(1, SEQUENCES, STEP_TOKENS),
        kv_cache_memory_bytes=int(KV_GIB * GIB),
        gpu_memory_utilization=0.95,
    )


def serve(base: Path, folders: dict[SyntheticVariant, Path], lines: Sequence[str], given: Any) -> None:
    kinds = tuple(kind.value for kind in launched_kinds({VariantKind(v.kind) for v in folders}))
    spec = read_model(base)
    estimator = Estimator(spec, calibrate(spec, from_lines(lines, "a profile")), kinds)
    record: dict[str, Any] = {
        "command": rehearsing.command("benchmarks.mixes", None),
        "layers": given.layers,
        "rows": [],
    }
    began_s = time.monotonic()
    llm = start(base, folders, kinds)
    print(f"the engine started in {time.monotonic() - began_s:.0f} s", flush=True)
    for row in compared(llm, estimator, requested(folders), LOADS, given.repeats):
        record["rows"].append(row)
        print(*row.values(), sep=" | ", flush=True)
        if row["what"] == "tokens/s":
            rehearsing.write_result(given.out, {**record, "summary": summary(record["rows"])})
    print(summary(record["rows"]), flush=True)


def main(argv: Sequence[str] | None = None) -> None:
    parser = rehearsing.parser(__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--work", type=Path, default=Path("/tmp/mixes"))
    parser.add_argument(
        "--lines", type=Path, help="the profile's measurements; OUT with another ending if not given"
    )
    parser.add_argument("--part", choices=("both", "measure", "serve"), default="both")
    parser.add_argument("--layers", type=int, default=SHAPE["num_hidden_layers"])
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=560.0, help="for the profile")
    given = parser.parse_args(argv)
    lines_file: Path = given.lines or given.out.with_suffix(".jsonl")
    base = gpu_engine.write_dummy_base(given.work / "base", shape_of(given.layers))
    if given.part != "serve":
        measure(base, given.work, given.seconds, lines_file)
    if given.part != "measure":
        lines = lines_file.read_text().splitlines()
        serve(base, write_variants(base, given.work, measured_kinds(lines)), lines, given)


# --- in small -------------------------------------------------------------------------------------------


def rehearse(folder: Path, llm: Any) -> None:
    """A LoRA and the base in the engine that rehearsals share, measured by a few loads of itself."""
    base = base_of(llm)
    spec = read_model(base)
    files = {LORA[0]: synthetic_variants.write(LORA[0], spec, spec.num_layers, folder / "lora")}
    requests = requested(files)
    setting, lines = Setting((spec.num_layers,), batched_tokens=STEP_TOKENS), list[Measurement]()
    for number, (batch, length, mix) in enumerate(
        ((1, 8, ()), (4, 8, ()), (1, 24, ()), (1, 8, LORA[:1]), (4, 8, LORA[:1]))
    ):
        point, tokens = Point(batch, length, mix), 6
        arrivals = run(llm, point, tokens, 100 + number, requests)
        lines.append(timing(setting, point, tokens, [arrivals], ()))
    estimator = Estimator(spec, calibrate(spec, lines), ())
    asked, load = [None, requests[LORA[0]]], Workload(3, 12, 4)
    estimate = estimator.of((None, LORA[0]), load)
    rows = [
        row
        for how, play in (("burst", of_burst), ("closed", of_closed_loop))
        for row in rows_of("base, LoRA", how, load, estimate, play(llm, load, asked, 7))
    ]
    assert all(row["measured"] > 0 for row in rows)
    rehearsing.write_result(folder / "mixes.json", {"rows": rows, "summary": summary(rows)})
    rehearsing.check(folder / "mixes.json", "rows", "summary")


if __name__ == "__main__":
    rehearsing.run(main, rehearse)
