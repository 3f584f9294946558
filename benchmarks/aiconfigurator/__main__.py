"""aiconfigurator's estimates and ours, beside the same plans measured whole.

    python3 -m venv AIC && AIC/bin/pip install aiconfigurator==0.12.0
    python -m benchmarks.aiconfigurator --python AIC/bin/python --truth T.jsonl --fingerprints F.jsonl \\
        --out O.json

Rows as `benchmarks.profiling` writes them. Only plans that both know: stages of equal size, bfloat16 or fp8.
Its `static` mode is asked, as all requests come at once: its TTFT is when the whole batch has its first
token, and is compared with the last request's; its memory is the largest rank's, beside the KV cache.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import rehearsing
from benchmarks.profiling.results import by_shape, merged
from benchmarks.profiling.shapes import SHAPES, spec
from benchmarks.profiling.tasks import Kind
from profiler.measurements import Footprint, Measurement, Point, Setting, Timing
from profiler.physical.calibrating import calibrate
from profiler.physical.calibration import Calibration, Cut
from profiler.physical.memory import rank_bytes
from profiler.physical.pipeline import latency
from profiler.types import Plan, Workload

SYSTEM, BACKEND = "h200_sxm", "vllm"
QUANTIZATIONS = {"none": None, "fp8": "fp8"}


@dataclass(frozen=True)
class Question:
    shape: str
    setting: Setting
    point: Point
    output_tokens: int

    @property
    def is_common(self) -> bool:
        stages = self.setting.layers_per_stage
        whole = self.setting.layers == SHAPES[self.shape]["num_hidden_layers"]
        return whole and len(set(stages)) == 1 and self.setting.quantization in QUANTIZATIONS

    def arguments(self, folder: Path) -> dict[str, Any]:
        tp = self.setting.tensor_parallel
        experts = {"moe_tp_size": tp, "moe_ep_size": 1} if "num_experts" in SHAPES[self.shape] else {}
        quantization = QUANTIZATIONS[self.setting.quantization]
        return {
            "model_path": str(folder / self.shape),
            "system_name": SYSTEM,
            "backend_name": BACKEND,
            "mode": "static",
            "isl": self.point.input_tokens,
            "osl": self.output_tokens,
            "batch_size": self.point.batch,
            "tp_size": tp,
            "pp_size": len(self.setting.layers_per_stage),
            **({} if quantization is None else {"gemm_quant_mode": quantization}),
            **experts,
        }


def ask(python: str, questions: Sequence[Question]) -> list[dict[str, Any]]:
    """Its answers, in order."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for shape in {question.shape for question in questions}:
            (folder / shape).mkdir()
            (folder / shape / "config.json").write_text(json.dumps(SHAPES[shape]))
        lines = "".join(json.dumps(question.arguments(folder)) + "\n" for question in questions)
        asking = Path(__file__).with_name("asking.py")
        ran = subprocess.run([python, asking], input=lines, stdout=subprocess.PIPE, text=True, check=True)
    return [json.loads(line) for line in ran.stdout.splitlines() if line.startswith("{")]


@dataclass(frozen=True)
class Compared:
    """One figure of one plan, in seconds or bytes."""

    shape: str
    figure: str
    measured: float
    theirs: float
    ours: float


def common(name: str, measurements: Iterable[Measurement]) -> Iterator[tuple[Question, Timing]]:
    for measured in measurements:
        if isinstance(measured, Timing):
            question = Question(name, measured.setting, measured.point, measured.output_tokens)
            if question.is_common:
                yield question, measured


def times(
    asked: Iterable[tuple[Question, Timing]],
    answers: Iterable[dict[str, Any]],
    calibrations: Mapping[str, Calibration],
) -> Iterator[Compared]:
    for (question, measured), answer in zip(asked, answers, strict=True):
        if "refused" in answer:
            continue
        name, setting, point = question.shape, question.setting, question.point
        work = Workload(point.batch, point.input_tokens, measured.output_tokens)
        ours = latency(calibrations[name], Cut.of(setting), setting.layers_per_stage, work)
        yield Compared(name, "TTFT of the last", measured.ttft_last_s, answer["ttft_s"], ours.ttft_last_s)
        yield Compared(name, "TPOT", measured.tpot_s, answer["tpot_s"], ours.tpot_s)


def memory(
    footprints: Iterable[tuple[str, Footprint]],
    answers: Mapping[tuple[str, Setting], float],
    calibrations: Mapping[str, Calibration],
) -> Iterator[Compared]:
    """Of each plan once. `answers`: bytes beside the KV cache."""
    for name, measured in footprints:
        if (theirs := answers.get((name, measured.setting))) is None:
            continue
        plan = Plan(measured.setting.tensor_parallel, measured.setting.layers_per_stage, "none", 1, 0, 0, 0)
        ours = rank_bytes(calibrations[name], Cut.of(measured.setting), plan)
        yield Compared(
            name,
            "memory",
            max(measured.taken(rank) for rank in measured.ranks),
            theirs,
            max(rank.without_kv_cache for rank in ours),
        )


def summary(rows: Sequence[Compared]) -> list[dict[str, Any]]:
    """Absolute percentage errors: median and 90th percentile, by figure and shape, and by figure."""
    table = []
    for figure in sorted({row.figure for row in rows}):
        for shape in (*sorted({row.shape for row in rows}), "all"):
            mine = [row for row in rows if row.figure == figure and shape in (row.shape, "all")]
            errors = {
                who: [100 * abs(getattr(row, who) / row.measured - 1) for row in mine]
                for who in ("theirs", "ours")
            }
            line: dict[str, Any] = {"figure": figure, "shape": shape, "count": len(mine)}
            for who, values in errors.items():
                line[f"{who}_median_percent"] = round(float(np.median(values)), 1)
                line[f"{who}_p90_percent"] = round(float(np.quantile(values, 0.9)), 1)
            table.append(line)
    return table


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="aiconfigurator's estimates and ours, beside measurements.")
    parser.add_argument("--python", required=True, help="of an environment with aiconfigurator")
    parser.add_argument("--fingerprints", type=Path, required=True)
    parser.add_argument("--truth", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args(argv)
    fingerprints, truth = by_shape(given.fingerprints), by_shape(given.truth)
    calibrations = {name: calibrate(spec(name), fingerprints[name]) for name in truth}
    asked = [pair for name, measured in truth.items() for pair in common(name, measured)]
    answers = ask(given.python, [question for question, _ in asked])
    of_plan = {
        (question.shape, question.setting): answer["rank_bytes"]
        for (question, _), answer in zip(asked, answers, strict=True)
        if "refused" not in answer
    }
    footprints = [(name, row) for name in truth for row in truth[name] if isinstance(row, Footprint)]
    rows = [*times(asked, answers, calibrations), *memory(footprints, of_plan, calibrations)]
    table = summary(rows)
    for line in table:
        print(" ".join(str(value) for value in line.values()))
    refused = Counter(answer["refused"] for answer in answers if "refused" in answer)
    record = {
        "command": f"python -m benchmarks.aiconfigurator --python PYTHON --fingerprints "
        f"{given.fingerprints.name} --truth {given.truth.name} --out {given.out.name}",
        "database": sorted({answer["database"] for answer in answers if "database" in answer}),
        "asked": len(asked),
        "refused": dict(refused),
        "rows": table,
    }
    rehearsing.write_result(given.out, record)


# What is asked instead of aiconfigurator: it answers one figure for everything, and knows no fp8.
STAND_IN = """
from types import SimpleNamespace

GIB = {"total": 2.0, "kvcache": 1.0}


def cli_estimate(**asked):
    if "gemm_quant_mode" in asked:
        raise ValueError("a stand-in knows no fp8")
    summary = SimpleNamespace(get_memory=lambda: GIB)
    return SimpleNamespace(ttft=1000.0, tpot=1000.0, summary=summary, backend_version="stand-in")
"""


def rehearse(folder: Path) -> None:
    """What is committed of our measurements, beside answers of a stand-in for aiconfigurator."""
    package = folder / "aiconfigurator" / "cli"
    package.mkdir(parents=True)
    (package / "api.py").write_text(STAND_IN)
    python = folder / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={folder} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    measured = rehearsing.RESULTS / "profiling"
    out = folder / "aiconfigurator.json"
    files = [f"--{kind}={merged(kind, measured)}" for kind in (Kind.FINGERPRINTS, Kind.TRUTH)]
    main(["--python", str(python), *files, "--out", str(out)])
    record = rehearsing.check(out, "rows", "refused")
    assert record["database"] == ["stand-in"]
    assert {row["figure"] for row in record["rows"]} == {"TTFT of the last", "TPOT", "memory"}


if __name__ == "__main__":
    rehearsing.run(main, rehearse)
