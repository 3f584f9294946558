"""The report of how far predictions are from whole models, where campaigns broke off."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import profiling_errors
from benchmarks.profiling.results import by_shape
from benchmarks.profiling.shapes import spec
from benchmarks.profiling.tasks import Task, fingerprints, truth
from benchmarks.profiling_errors import errors
from profiler.measurements import Footprint, Log, Measurement, RankMemory, Timing
from profiler.physical.calibration import Cut
from profiler.predicting.memory import Memory
from profiler.predicting.predict import Ground
from profiler.roofline import VLLM_ON_GPU
from profiler.types import DeviceRates, Plan
from testkit.engine_simulator import Machine, measured

SHAPE, MIB = "llama-3.2-3b", 1 << 20
RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "profiling" / "truth.jsonl"


def whole(tasks: Iterable[Task]) -> list[Measurement]:
    """Two loads of each."""
    found: list[Measurement] = []
    for task in tasks:
        memory = RankMemory(4000 * MIB, 300 * MIB, 100 * MIB, 500 * MIB, MIB, 16)
        found.append(Footprint(task.setting, (memory,) * task.gpus, 50.0))
        for point in task.points[:2]:
            timing = measured(Machine(), task.setting, point, task.output_tokens, 2048)
            found.append(replace(timing, taken_s=1.0))
    return found


PROFILE, TRUTH = whole(fingerprints(SHAPE, 4)), whole(truth(SHAPE, 4))


def without(tp: int, rows: list[Measurement]) -> list[Measurement]:
    return [m for m in rows if m.setting.tensor_parallel != tp]


def test_every_measurement_has_errors_when_all_fingerprints_are_there() -> None:
    found, gaps = errors(SHAPE, PROFILE, TRUTH)
    timings = sum(isinstance(m, Timing) for m in TRUTH)
    ranks = sum(len(m.ranks) for m in TRUTH if isinstance(m, Footprint))
    assert (len(found), gaps) == (2 * timings + ranks, [])


def test_a_cut_that_was_not_fingerprinted_is_listed_and_stops_no_other() -> None:
    found, (gap,) = errors(SHAPE, without(2, PROFILE), TRUTH)
    left_out = len(TRUTH) - len(without(2, TRUTH))
    assert (gap.shape, gap.cut, gap.count) == (SHAPE, Cut(2), left_out)
    assert found == errors(SHAPE, without(2, PROFILE), without(2, TRUTH))[0] != []


@pytest.mark.parametrize("rows", [[], [m for m in PROFILE if isinstance(m, Footprint)]])
def test_a_shape_without_timings_is_listed_whole(rows: list[Measurement]) -> None:
    found, gaps = errors(SHAPE, rows, TRUTH)
    assert found == []
    assert sum(gap.count for gap in gaps) == len(TRUTH)
    assert {gap.cut.tensor_parallel for gap in gaps} == {1, 2, 4}


def test_a_report_is_written_of_what_there_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Errors for a shape with one fingerprint and for a shape with none."""
    profile, plans = (write(tmp_path / kind, rows) for kind, rows in (("f", PROFILE[:3]), ("t", TRUTH)))
    other = [json.loads(line) for line in plans.read_text().splitlines()]
    with plans.open("a") as file:
        file.writelines(json.dumps({**row, "shape": "llama-2-7b"}) + "\n" for row in other)
    arguments = ["--fingerprints", str(profile), "--truth", str(plans), "--out", str(tmp_path / "e.json")]
    monkeypatch.setattr(sys, "argv", ["profiling_errors", *arguments])
    profiling_errors.main()
    report = json.loads((tmp_path / "e.json").read_text())
    assert {row["shape"] for row in report["rows"]} == {SHAPE, "all"}
    assert {gap["shape"] for gap in report["not_predicted"]} == {SHAPE, "llama-2-7b"}
    assert report["costs"]["llama-2-7b"].keys() == {"not_compared"}
    assert report["costs"][SHAPE]["profile"]["engines"] == 1
    assert (tmp_path / "e.png").exists()


def write(folder: Path, rows: list[Measurement]) -> Path:
    """The rows of merged files."""
    path = folder / "merged.jsonl"
    folder.mkdir()
    log = Log(folder / "rows")
    for row in rows:
        log.append(row)
    lines = [{"shape": SHAPE, **json.loads(line)} for line in (folder / "rows").read_text().splitlines()]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_ranks_without_a_profile_get_the_memory_measured_on_h200s() -> None:
    """In bfloat16, to 32 MiB, and at most 1 GiB more; fp8 takes more than its bytes, which only a profile
    sees."""
    compared = 0
    for name, measurements in by_shape(RESULTS).items():
        for found in measurements:
            if isinstance(found, Footprint) and found.setting.quantization == "none":
                setting = found.setting
                plan = Plan(setting.tensor_parallel, setting.layers_per_stage, "none", 1, 0, 0, 0)
                plan = replace(plan, batched_tokens=setting.batched_tokens)
                rates = (DeviceRates(1.0, 1.0),) * plan.world_size
                ranks = Memory(Ground(spec(name), rates, overheads=VLLM_ON_GPU), 0).ranks(plan)
                for rank, actual in zip(ranks, found.ranks, strict=True):
                    assert -32 * MIB <= rank.total.value - found.taken(actual) <= 1024 * MIB, (name, setting)
                    compared += 1
    assert compared >= 29
