"""The campaign of measurements on a host's GPUs: who runs where and when, what fails, what files hold."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.profiling import lanes, results
from benchmarks.profiling.__main__ import Host
from benchmarks.profiling.cost import compared, cost
from benchmarks.profiling.lanes import Ending, Start, carry_out
from benchmarks.profiling.schedule import Slot, before, cores_of, describe, pack
from benchmarks.profiling.shapes import GPU_SHAPES, SHAPES
from benchmarks.profiling.tasks import POINTS, Kind, Task, chosen, truth, uneven
from profiler.measurements import Footprint, Log, Measurement, Point, RankMemory, Setting, Timing
from workers.measuring.engine_run_job import Job

TINY = tuple(
    Task(Kind.TRUTH, "tiny", Setting(split, tp), (Point(1, 8),)) for tp, split in ((1, (8,)), (1, (4, 4)))
)


def task(gpus: int, points: int, tier: int) -> Task:
    return Task(Kind.TRUTH, "tiny", Setting((8,), gpus), POINTS[:points], tier=tier)


TASKS = st.lists(
    st.builds(task, st.sampled_from([1, 2, 4]), st.integers(1, 8), st.integers(1, 3)), max_size=12
)


@given(TASKS, st.sampled_from([4, 8]), st.floats(0, 900))
def test_gpus_carry_one_engine_at_a_time_within_the_budget(
    tasks: list[Task], gpus: int, budget: float
) -> None:
    slots, left = pack(tasks, gpus, budget)
    assert sorted([slot.task for slot in slots] + left, key=id) == sorted(tasks, key=id)
    for slot in slots:
        assert len(slot.gpus) == slot.task.gpus
        assert set(slot.gpus) <= set(range(gpus))
        assert slot.end_s - slot.begin_s == pytest.approx(slot.task.expected_s)
        assert slot.end_s <= budget
    for one, other in itertools.combinations(slots, 2):
        if set(one.gpus) & set(other.gpus):
            assert one.end_s <= other.begin_s or other.end_s <= one.begin_s
    assert f"{len(slots)} engines" in describe(slots, left, gpus)


@given(TASKS)
def test_list_scheduling_is_less_than_twice_as_long_as_any_schedule(tasks: list[Task]) -> None:
    """For one tier: no schedule is shorter than its longest task, nor than all its work on all GPUs (Graham's
    bound holds for tasks of powers of two, widest first)."""
    tasks = [replace(one, tier=1) for one in tasks]
    slots, left = pack(tasks, 4, 1e9)
    assert not left
    if slots:
        work_s = sum(one.expected_s * one.gpus for one in tasks)
        least = max(work_s / 4, *(one.expected_s for one in tasks))
        first = min(slot.begin_s for slot in slots)
        assert max(slot.end_s for slot in slots) - first <= 2 * least + 1e-6


def test_a_task_for_more_gpus_than_there_are_is_refused() -> None:
    with pytest.raises(ValueError, match="needs 4 GPUs, the host has 2"):
        pack([task(4, 1, 1)], 2, 1000)


@given(st.integers(1, 8), st.sets(st.integers(0, 200), min_size=1))
def test_gpus_share_no_core_where_there_are_enough(gpus: int, cores: set[int]) -> None:
    shares = [cores_of([gpu], gpus, cores) for gpu in range(gpus)]
    assert all(share and share <= cores for share in shares)
    if len(cores) >= gpus:
        assert len({len(share) for share in shares}) == 1
        assert sum(map(len, shares)) == len(frozenset().union(*shares)) > len(cores) - gpus
        assert cores_of(range(gpus), gpus, cores) == frozenset().union(*shares)


def test_an_engine_runs_on_its_cores(tmp_path: Path) -> None:
    core = min(os.sched_getaffinity(0))
    slots, _ = pack([task(1, 1, 1)], 1, 1e9)
    program = "import os; print(sorted(os.sched_getaffinity(0)))"

    def start(slot: Slot, number: int) -> Start:
        command = (sys.executable, "-S", "-c", program)
        log, gate = tmp_path / "log", tmp_path / "gate"
        return Start(command, dict(os.environ), log, gate, lambda: False, lambda: 0, frozenset({core}))

    carry_out(slots, start, 1e9, lambda ending: None)
    assert (tmp_path / "log").read_text() == f"[{core}]\n"


BOTH = [Kind.TRUTH, Kind.FINGERPRINTS]
TWO = ["llama-3.2-3b", "llama-2-7b"]


@pytest.mark.parametrize("budget_s", range(100, 1500, 200))
def test_a_run_that_begins_within_the_budget_is_predictable(budget_s: float) -> None:
    """The reference uses all fingerprints of its TP, and for pipelines those of a pipeline."""
    tasks = chosen(BOTH, TWO, ["none"], 4, 1)
    slots, _ = pack(tasks, 4, budget_s)
    begun = {slot.task for slot in slots}
    for one in begun:
        tp, pipeline = one.setting.tensor_parallel, len(one.setting.layers_per_stage) > 1
        needed = {
            t
            for t in tasks
            if (t.kind, t.shape, t.setting.tensor_parallel) == (Kind.FINGERPRINTS, one.shape, tp)
            and (pipeline or len(t.setting.layers_per_stage) == 1)
        }
        assert one.kind is Kind.FINGERPRINTS or needed <= begun
    if budget_s >= 500:
        assert any(one.kind is Kind.TRUTH for one in begun)
        assert {slot.task.shape for slot in slots[:6]} == {"llama-3.2-3b"}


def test_all_fingerprints_may_come_first() -> None:
    tasks = chosen(BOTH, TWO, ["none"], 4, 1)
    slots, _ = pack(tasks, 4, 1e9, kinds_first=True)
    kinds = [slot.task.kind for slot in slots]
    shapes = [slot.task.shape for slot in slots if slot.task.kind is Kind.FINGERPRINTS]
    assert list(dict.fromkeys(shapes)) == TWO
    assert kinds == sorted(kinds, key=list(Kind).index)


def test_known_measurements_delay_no_other_run() -> None:
    only = [task for task in chosen(BOTH, TWO, ["none"], 4, 1) if task.gpus > 1]
    _, left = pack(only, 4, 1e9)
    assert not left


@pytest.mark.parametrize("name", GPU_SHAPES)
def test_every_shape_is_measured_in_even_stages_and_three_uneven_splits(name: str) -> None:
    layers = SHAPES[name]["num_hidden_layers"]
    found = truth(name, 4)
    assert {(t.setting.tensor_parallel, len(t.setting.layers_per_stage)) for t in found} == {
        (1, 1), (2, 1), (4, 1), (1, 2), (2, 2), (1, 4),
    }  # fmt: skip
    for tp, stages in ((1, 2), (1, 4), (2, 2)):
        splits = {
            t.setting.layers_per_stage
            for t in found
            if (t.setting.tensor_parallel, len(t.setting.layers_per_stage)) == (tp, stages)
        }
        assert len([s for s in splits if max(s) - min(s) > 1]) == 3
        assert len(splits) == 4
        assert all(sum(split) == layers and min(split) > 0 for split in splits)
    assert len({one.label for one in found}) == len(found)


@pytest.mark.parametrize("stages", [2, 4])
def test_uneven_splits_have_their_largest_stage_in_different_places(stages: int) -> None:
    places = [split.index(max(split)) for split in uneven(32, stages)]
    assert len(set(places)) == stages if stages == 2 else 3


def test_tiers_and_quantizations_are_chosen() -> None:
    first = chosen([Kind.TRUTH], ["llama-2-7b"], ["none", "fp8"], 4, 1)
    everything = chosen([Kind.TRUTH], ["llama-2-7b"], ["none", "fp8"], 4, 3)
    assert {t.setting.quantization for t in first} == {"none", "fp8"}
    assert set(first) < set(everything)


def test_a_quantization_is_measured_as_a_profile_does() -> None:
    """One depth, and no pipeline: those are known of the model as it is."""
    found = chosen([Kind.FINGERPRINTS], ["llama-2-7b"], ["fp8"], 4, 1)
    assert {t.setting for t in found} == {Setting((32,), tp, "fp8") for tp in (1, 2, 4)}
    assert len(chosen([Kind.FINGERPRINTS], ["llama-2-7b"], ["none"], 4, 1)) == 5


# --- carrying out -------------------------------------------------------------------------------------

WORK = """
import pathlib, sys, time
gate, out, seconds = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2]), float(sys.argv[3])
imported = time.monotonic()
out.with_suffix(".imported").touch()
while not gate.exists():
    time.sleep(0.005)
began = time.monotonic()
time.sleep(seconds)
awaited = [pathlib.Path(name) for name in sys.argv[4:]]
while not all(path.exists() for path in awaited) and time.monotonic() < began + 60:
    time.sleep(0.005)
out.write_text(f"{imported} {began} {time.monotonic()}")
"""


class Processes:
    """Stand-ins for engines, which wait at their gates and note when they had their GPUs."""

    def __init__(self, folder: Path, seconds: float, programs: dict[int, str] | None = None) -> None:
        self.folder, self.seconds, self.programs = folder, seconds, programs or {}
        self.awaited: dict[int, str] = {}  # by number: a file that one waits for before it ends
        self.endings: list[Ending] = []

    def progress(self) -> int:
        return len(list(self.folder.glob("*.measured")))

    def start(self, slot: Slot, number: int) -> Start:
        gate = self.folder / f"{number}.gate"
        program = self.programs.get(number, WORK)
        awaited = [str(self.folder / self.awaited[number])] if number in self.awaited else []
        arguments = (str(gate), str(self.folder / f"{number}.out"), str(self.seconds), *awaited)
        command = (sys.executable, "-S", "-X", "faulthandler", "-c", program, *arguments)
        return Start(
            command, dict(os.environ), self.folder / f"{number}.log", gate, lambda: False, self.progress
        )

    def run(self, slots: Sequence[Slot], budget_s: float = 1000.0) -> None:
        carry_out(slots, self.start, budget_s, self.endings.append)

    def spans(self, count: int) -> list[list[float]]:
        files = [self.folder / f"{number}.out" for number in range(count)]
        return [list(map(float, file.read_text().split())) for file in files]


def test_an_engine_is_imported_while_another_measures_but_waits_for_its_gpus(tmp_path: Path) -> None:
    slots, _ = pack([task(4, 1, 1), task(2, 1, 1), task(2, 1, 1), task(1, 1, 1)], 4, 1e9)
    processes = Processes(tmp_path, 0.1)
    processes.awaited[0] = "1.imported"
    processes.run(slots)
    assert [ending.problem for ending in processes.endings] == [""] * 4
    spans = processes.spans(4)
    for number, (_, began, _) in enumerate(spans):
        for earlier in before(slots, number):
            assert began >= spans[earlier][2]
    assert spans[1][0] < spans[0][2]  # it was there before the first had ended


@pytest.mark.timeout(180)
def test_a_failed_run_is_reported_and_stops_no_other_run(tmp_path: Path) -> None:
    slots, _ = pack([task(2, 1, 1), task(2, 2, 1), task(2, 3, 1)], 2, 1e9)
    processes = Processes(tmp_path, 0.1, {1: "raise MemoryError('no room')"})
    processes.run(slots)
    problems = {ending.task: ending.problem for ending in processes.endings}
    assert problems[slots[1].task] == "exit code 1: MemoryError: no room"
    assert problems[slots[0].task] == problems[slots[2].task] == ""
    assert "Traceback" in next(e.log for e in processes.endings if e.problem)


def test_nothing_runs_beyond_the_budget(tmp_path: Path) -> None:
    """The first engine would run for ten minutes; the second engine is not begun."""
    slots, _ = pack([task(1, 1, 1), task(1, 2, 1)], 1, 1e9)
    processes = Processes(tmp_path, 600.0)
    budget_s = slots[0].task.expected_s + 1.0
    quick = [replace(slot, task=_Quick(**vars(slot.task))) for slot in slots]
    processes.run(quick, 2.0)
    assert not (tmp_path / "0.out").exists()  # written when an engine ends by itself
    assert "budget is over" in processes.endings[-1].problem
    assert budget_s > 2  # with what they really should take, none would have been begun
    strict = Processes(tmp_path, 60.0)
    strict.run(slots, 2.0)
    assert [e.problem.split(":")[0] for e in strict.endings] == ["not begun", "not begun"]


class _Quick(Task):
    @property
    def expected_s(self) -> float:
        return 0.5

    @property
    def longest_s(self) -> float:
        return 0.0


HANGS = """
import os, pathlib, subprocess, sys, time
gate = pathlib.Path(sys.argv[1])
folder = gate.parent
def measures():
    while not gate.exists():
        time.sleep(0.005)
    for number in range(4):
        time.sleep(2.5)
        (folder / f"{number}.measured").touch()
rank = ("def waits_for_ever():", "    import time; time.sleep(60)", "waits_for_ever()")
subprocess.Popen([sys.executable, "-S", "-X", "faulthandler", "-c", "\\n".join(rank)])
measures()
time.sleep(60)
"""


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_an_engine_may_run_as_long_as_it_measures_and_a_hanging_one_prints_its_stack(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lanes, "GRACE_S", 8.0)  # on a busy machine an interpreter takes seconds to start
    slots, _ = pack([_Quick(**vars(task(1, 1, 1)))], 1, 1e9)
    running = Processes(tmp_path, 60.0, {0: HANGS})
    running.run(slots)
    (ending,) = running.endings
    assert ending.problem.startswith("measured nothing for 8 s")
    assert ending.seconds > 4 * 2.5 + 8.0
    assert "in waits_for_ever" in ending.log


KILLED = """
import pathlib, sys, time
from benchmarks.profiling.lanes import Start, carry_out
from benchmarks.profiling.schedule import pack
from benchmarks.profiling.tasks import POINTS, Kind, Task
from profiler.measurements import Setting
folder = pathlib.Path(sys.argv[1])
engine = "import os, sys; print(os.getpid(), flush=True); sys.stdin.read()"
slots, _ = pack([Task(Kind.TRUTH, "tiny", Setting((8,)), POINTS[:1])], 1, 1e9)
def start(slot, number):
    command = (sys.executable, "-S", "-c", engine)
    return Start(command, {}, folder / "log", folder / "gate", lambda: False, lambda: 0)
carry_out(slots, start, 1e9, print)
"""


@pytest.mark.timeout(180)
def test_engines_end_with_a_benchmark_that_is_killed(tmp_path: Path) -> None:
    benchmark = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(tmp_path)], env={**os.environ, "PYTHONPATH": "."}
    )
    log = tmp_path / "log"
    while not (log.exists() and log.read_text().endswith("\n")):
        time.sleep(0.05)
    engine = psutil.Process(int(log.read_text()))
    benchmark.kill()
    benchmark.wait()
    assert not psutil.wait_procs([engine], timeout=60)[1]


def test_engines_share_neither_folders_nor_ports(tmp_path: Path) -> None:
    """Those of one shape in two quantizations, and those that write their variants into their folders."""
    tasks = chosen(list(Kind), ["tiny"], ["none", "fp8"], 1, 1)
    host = Host(tmp_path / "out", tmp_path, "cuda", 100.0)
    starts = [host.start(Slot(one, (2,), 0.0, 1.0), number) for number, one in enumerate(tasks)]
    jobs = [Job.model_validate_json(Path(start.command[-2]).read_text()) for start in starts]
    assert len({job.folder for job in jobs}) == len(tasks) > 4
    assert all((job.folder / "config.json").exists() for job in jobs)
    ports = [int(start.environment["VLLM_PORT"]) for start in starts]
    assert min(abs(one - other) for one, other in itertools.combinations(ports, 2)) >= 100
    assert 1024 < min(ports) <= max(ports) < 32768 - 100
    for start in starts:
        assert start.command[-1] == "--end-with-stdin"
        assert start.environment["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
        assert start.environment["CUDA_VISIBLE_DEVICES"] == "2"


# --- files --------------------------------------------------------------------------------------------


def measured(one: Task) -> list[Measurement]:
    memory = (RankMemory(1, 2, 3, 4, 5, 6),) * one.gpus
    timings = [Timing(one.setting, point, 8, 0.1, 0.1, 0.01, 0.2, (), 0.7) for point in one.points]
    return [Footprint(one.setting, memory, 1.0), *timings]


def write(one: Task, out: Path, count: int = 99) -> None:
    results.part(one, out).parent.mkdir(parents=True, exist_ok=True)
    log = Log(results.part(one, out))
    for measurement in measured(one)[:count]:
        log.append(measurement)


def test_a_complete_measurement_in_any_folder_is_not_repeated(tmp_path: Path) -> None:
    one, other = TINY
    write(one, tmp_path / "a")
    write(other, tmp_path / "b", count=1)
    assert results.missing(TINY, [tmp_path / "a", tmp_path / "b"]) == [other]
    results.merge([tmp_path / "a"], tmp_path / "kept")
    assert results.missing(TINY, [tmp_path / "kept"]) == [other]


def test_several_runs_are_merged_and_the_first_of_a_load_counts(tmp_path: Path) -> None:
    one, other = TINY
    write(one, tmp_path / "a")
    write(one, tmp_path / "b")
    write(other, tmp_path / "b")
    first = results.part(one, tmp_path / "a")
    first.write_text(first.read_text().replace("0.01", "0.03"))
    counts = results.merge([tmp_path / "a", tmp_path / "b"], tmp_path / "kept")
    assert counts == {Kind.TRUTH: 4}
    found = results.by_shape(results.merged(Kind.TRUTH, tmp_path / "kept"))["tiny"]
    assert [m.tpot_s for m in found if isinstance(m, Timing)] == [0.03, 0.01]
    again = results.merge([tmp_path / "b"], tmp_path / "kept")
    assert again == counts
    lines = results.merged(Kind.TRUTH, tmp_path / "kept").read_text().splitlines()
    assert {json.loads(line)["shape"] for line in lines} == {"tiny"}


def test_the_cost_of_measuring_is_summed() -> None:
    """By hand: an engine on one GPU and one on two, each of which starts in a second."""
    one, other = TINY
    found = cost([*measured(one), *measured(other)])
    engine_s = 1.0 + 0.7
    assert found.engines == 2
    assert found.gpu_s == pytest.approx(3 * engine_s)
    assert found.wall_s == pytest.approx(2 * engine_s)
    each = 1 + 2 + 3 + 4 + 16 * 5 / 6  # 1 x (8 + 8) tokens
    assert (found.peak_bytes, found.gpu_bytes) == pytest.approx((2 * each, each))
    assert compared(measured(one), measured(other))["ratios"]["gpu_s"] == 2.0
    with pytest.raises(ValueError, match="footprint of at least one engine"):
        cost([])
