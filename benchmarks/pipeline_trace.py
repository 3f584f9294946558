"""Where prefill steps spend their time on each GPU of a pipeline: torch's traces of an engine, and
of each step how long its kernels and each of the longest take, and how long a broadcast waits beside them.

    python -m benchmarks.pipeline_trace measure --shape qwen2.5-14b --split 24-24 --out FOLDER
    python -m benchmarks.pipeline_trace steps FOLDER --out RESULT.json     # needs no GPU

Two bursts of 8 prompts of 1024 tokens are traced (made-up weights, two different layers), after others.
"""

from __future__ import annotations

import argparse
import gzip
import json
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks import rehearsing
from benchmarks.gpu_job import gpu_job
from benchmarks.profiling import shapes
from profiler.measurements import Point, Setting
from workers.measuring import engine
from workers.measuring.timing import run

LOADS = (Point(8, 1024), Point(128, 128))
WARM_UPS, TRACED, TOKENS = 3, 2, 8
LONGEST = 4  # kernels told of each step
STEP, COLLECTIVE = "execute_context_", "nccl"


def measure(shape: str, setting: Setting, out: Path) -> None:
    """Writes FOLDER/rankN...json.gz, as torch does."""
    with tempfile.TemporaryDirectory() as work:
        job = gpu_job(shape, setting, LOADS, TOKENS, Path(work))
        profiler = {
            "profiler": "torch",
            "torch_profiler_dir": str(out.resolve()),
            "torch_profiler_with_stack": False,
            "torch_profiler_dump_cuda_time_total": False,
        }
        llm = engine.start(job, profiler_config=profiler)
        bursts(llm, LOADS, range(WARM_UPS))
        llm.start_profile()
        bursts(llm, LOADS[:1], range(WARM_UPS, WARM_UPS + TRACED))
        llm.stop_profile()


def bursts(llm: Any, loads: Sequence[Point], numbers: Iterable[int]) -> None:
    for number in numbers:
        for load in loads:
            told(run(llm, load, TOKENS, number).first)


def told(first_s: list[float]) -> None:
    print("first tokens after", *(f"{at * 1e3:.1f}" for at in sorted(set(first_s))), "ms", flush=True)


def steps_of(trace: dict[str, Any]) -> list[dict[str, Any]]:
    """In milliseconds, of the prefill steps with most of their room."""
    events = trace["traceEvents"]
    kernels = [event for event in events if event.get("cat") == "kernel"]
    steps = [
        event for event in events if event.get("cat") == "gpu_user_annotation" and is_fill(event["name"])
    ]
    return [step_of(step, kernels) for step in sorted(steps, key=lambda step: float(step["ts"]))]


def is_fill(name: str) -> bool:
    """`execute_context_2(2046)_generation_2(2)`: two prompts, 2046 of their tokens."""
    return name.startswith(STEP) and int(name.split("(")[1].partition(")")[0]) > 1024


def step_of(step: dict[str, Any], kernels: list[dict[str, Any]]) -> dict[str, Any]:
    begin, end = step["ts"], step["ts"] + step["dur"]
    own = [one for one in kernels if begin <= one["ts"] < end and COLLECTIVE not in one["name"]]
    waiting = (one for one in kernels if "Broadcast" in one["name"])
    beside = sum(max(0.0, min(one["ts"] + one["dur"], end) - max(one["ts"], begin)) for one in waiting)
    by_name: defaultdict[str, list[float]] = defaultdict(list)
    for one in own:
        by_name[one["name"].split("<")[0][:60]].append(one["dur"] / 1e3)
    longest = sorted(by_name.items(), key=lambda item: -sum(item[1]))[:LONGEST]
    return {
        "step": step["name"],
        "step_ms": round(step["dur"] / 1e3, 2),
        "broadcast_ms": round(beside / 1e3, 2),
        "kernels_ms": round(sum(one["dur"] for one in own) / 1e3, 2),
        "mean_ms": {name: round(statistics.mean(taken), 4) for name, taken in longest},
    }


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("measure")
    one.add_argument("--shape", default="qwen2.5-14b", choices=tuple(shapes.SHAPES))
    one.add_argument("--split", default="24-24", help="layers of each stage")
    one.add_argument("--quantization", default="none")
    one.add_argument("--out", type=Path, required=True)
    two = commands.add_parser("steps")
    two.add_argument("folder", type=Path)
    two.add_argument("--out", type=Path, required=True)
    given = parser.parse_args(argv)
    if given.command == "measure":
        given.out.mkdir(parents=True, exist_ok=True)
        split = tuple(int(layers) for layers in given.split.split("-"))
        measure(given.shape, Setting(split, 1, given.quantization), given.out)
        return
    traces = sorted(given.folder.glob("*rank*.json.gz"))
    if not traces:
        raise SystemExit(f"expected traces of ranks (*rank*.json.gz) in {given.folder}, found none")
    ranks = [steps_of(json.loads(gzip.decompress(trace.read_bytes()))) for trace in traces]
    result = {"command": f"python -m benchmarks.pipeline_trace steps {given.folder.name}", "ranks": ranks}
    rehearsing.write_result(given.out, result)


def rehearse(folder: Path, llm: Any) -> None:
    """Bursts in the engine; and the steps of a trace written by hand, in microseconds as torch's are."""
    bursts(llm, (Point(2, 64),), range(2))
    events = [
        ("gpu_user_annotation", "execute_context_2(2046)_generation_0(0)", 0, 1000),
        ("gpu_user_annotation", "execute_context_0(0)_generation_2(2)", 2000, 10),
        ("kernel", "gemm<bf16>", 0, 400),
        ("kernel", "ncclDevKernel_Broadcast", 500, 700),
    ]
    names = ("cat", "name", "ts", "dur")
    trace = {"traceEvents": [dict(zip(names, event, strict=True)) for event in events]}
    (folder / "rank0.pt.trace.json.gz").write_bytes(gzip.compress(json.dumps(trace).encode()))
    main(["steps", str(folder), "--out", str(folder / "steps.json")])
    (step,) = rehearsing.check(folder / "steps.json", "ranks")["ranks"][0]
    assert (step["step_ms"], step["kernels_ms"], step["broadcast_ms"]) == (1.0, 0.4, 0.5)


if __name__ == "__main__":
    rehearsing.run(main, rehearse)
