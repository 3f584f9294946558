"""A job that is killed goes on behind its last finished layer, and ends as one that was not."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from profiler.errors import CheckpointError
from testkit import random_variants as make
from testkit.compression.word_models import write_pair, write_texts
from workers.compression import job as job_module
from workers.compression.job import CalibrationOptions, Job, compress
from workers.compression.methods.delta_come import delta_come
from workers.compression.methods.deltacompress import deltacompress
from workers.compression.methods.deltamix import deltamix
from workers.compression.methods.low_rank import low_rank
from workers.compression.methods.magnitude import magnitude
from workers.compression.types import Compressed, Method, Problem
from workers.compression.work_folder import WorkFolder, work_folder

KILLED = 9
# The imports that each process would repeat: seconds of transformers.
PRELOADED = [
    "word_models",
    "workers.compression.job",
    "workers.compression.calibration.blocks",
    "workers.compression.methods.deltacompress",
    "transformers.models.auto.modeling_auto",
    "transformers.models.auto.tokenization_auto",
    "transformers.models.llama.modeling_llama",
]
WRITES = {"os.rename", "os.remove", "os.mkdir", "os.rmdir", "open"}


class Stopped(Exception):
    pass


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def hidden(out: Path) -> Path:
    return out.parent / f".{out.name}.compressing"


def stop_at(job: Job, words: str) -> None:
    """Run the job until it says that it is doing this."""

    def tell(share: float, what: str) -> None:
        if words in what:
            raise Stopped

    with pytest.raises(Stopped):
        compress(job, tell)


def counted(inner: Method, seen: list[str]) -> Method:
    """The method, which notes the layers that it was given."""

    def step(problem: Problem) -> Compressed:
        seen.append(problem.name)
        return inner.step(problem)

    return replace(inner, step=step)


def compress_until(base: Path, tuned: Path, out: Path, kind: str, calls: int) -> None:
    """In a process of its own, which ends at once before the given call that changes a folder."""
    torch.set_num_threads(1)
    done = 0

    def watch(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal done
        if event in WRITES and str(out.parent) in str(arguments[0]):
            if done == calls:
                os._exit(KILLED)
            done += 1

    sys.addaudithook(watch)
    compress(job_of(base, tuned, out, kind))


def job_of(base: Path, tuned: Path, out: Path, kind: str) -> Job:
    if kind == "calibrated":
        return Job(base, tuned, out, deltacompress(), CalibrationOptions(base.parent / "texts.txt", 4, 40))
    return Job(base, tuned, out, magnitude(), plain=kind == "checkpoint")


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "every"), [("delta", 1), ("checkpoint", 1), ("calibrated", 8)])
def test_a_job_that_is_killed_at_any_moment_continues(tmp_path: Path, kind: str, every: int) -> None:
    base, tuned = write_pair(tmp_path)
    write_texts(tmp_path / "texts.txt")
    compress(job_of(base, tuned, tmp_path / "undisturbed", kind))
    expected = contents(tmp_path / "undisturbed")
    processes = multiprocessing.get_context("forkserver")
    processes.set_forkserver_preload(PRELOADED)
    calls, code = 0, KILLED
    while code == KILLED:
        out = tmp_path / str(calls) / "out"
        process = processes.Process(target=compress_until, args=(base, tuned, out, kind, calls))
        process.start()
        process.join()
        code = process.exitcode or 0
        if out.exists() and not (hidden(out) / "result.json").exists():
            with pytest.raises(CheckpointError, match="exists already"):  # it was done
                compress(job_of(base, tuned, out, kind))
        else:
            result = compress(job_of(base, tuned, out, kind))
            assert result.size_bytes > 0
            assert [path.name for path in out.parent.iterdir()] == ["out"]
        assert contents(out) == expected, f"killed before call {calls}"
        calls += every
    assert code == 0
    assert calls > 50, "the kills were too few to have met every write"


def test_finished_layers_are_not_done_again(tmp_path: Path, base: Path, tuned: Path) -> None:
    out, seen = tmp_path / "out", list[str]()
    stop_at(Job(base, tuned, out, counted(magnitude(), seen)), "embedding")
    assert len(seen) == len(set(seen)) == 14
    compress(Job(base, tuned, out, counted(magnitude(), seen)))
    assert len(seen) == 14
    compress(Job(base, tuned, tmp_path / "undisturbed", magnitude()))
    assert contents(out) == contents(tmp_path / "undisturbed")
    assert not hidden(out).exists()


def test_a_finished_layer_that_was_damaged_is_done_again(tmp_path: Path, base: Path, tuned: Path) -> None:
    out, seen = tmp_path / "out", list[str]()
    stop_at(Job(base, tuned, out, magnitude()), "embedding")
    path = hidden(out) / "artefact" / "layer-00001.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"!")
    compress(Job(base, tuned, out, counted(magnitude(), seen)))
    assert {name.split(".")[2] for name in seen} == {"1"}
    compress(Job(base, tuned, tmp_path / "undisturbed", magnitude()))
    assert contents(out) == contents(tmp_path / "undisturbed")


def test_other_options_do_not_mix_with_what_lies_there(tmp_path: Path, base: Path, tuned: Path) -> None:
    out = tmp_path / "out"
    stop_at(Job(base, tuned, out, magnitude(4)), "embedding")
    with pytest.raises(CheckpointError, match=r"unfinished.*options \{'bits': 4.*\(now .*'bits': 2"):
        compress(Job(base, tuned, out, magnitude(2)))
    other = make.write_tuned(base, tmp_path / "other", 2)
    with pytest.raises(CheckpointError, match=r"unfinished.*fine-tune [0-9a-f]{12}\.\.\."):
        compress(Job(base, other, out, magnitude(4)))
    result = compress(Job(base, tuned, out, magnitude(4)))
    assert result.spec is not None
    assert result.spec.bits == (4,)


@pytest.mark.parametrize(
    ("method", "options", "others"),
    [
        (deltamix, {"ratio": 1 / 4}, {"ratio": 1 / 2}),
        (deltamix, {"ratio": 1 / 4, "max_widths": 4}, {"ratio": 1 / 4, "max_widths": 1}),
        (delta_come, {"ratio": 1 / 4}, {"ratio": 1 / 2}),
        (low_rank, {"ratio": 1 / 4}, {"ratio": 1 / 2}),
    ],
)
def test_layers_of_two_ratios_do_not_mix(
    tmp_path: Path,
    base: Path,
    tuned: Path,
    method: Callable[..., Method],
    options: dict[str, Any],
    others: dict[str, Any],
) -> None:
    """Every option of a method distinguishes its layers from others'."""
    uncalibrated = [replace(method(**each), calibrated=False) for each in (options, others)]
    stop_at(Job(base, tuned, tmp_path / "out", uncalibrated[0]), "layer 1")
    with pytest.raises(CheckpointError, match=r"unfinished.*options"):
        compress(Job(base, tuned, tmp_path / "out", uncalibrated[1]))


def test_no_file_of_another_job_stays(tmp_path: Path) -> None:
    """Files without a record, candidates and outcomes: all are of the inputs of before."""
    with work_folder(tmp_path / "out") as work:
        work.begin({"fine-tune": "a"})
        for left in (
            "checked.json",
            "artefact/layer-00000.safetensors",
            "tried/x/delta.json",
            "outcomes/x.json",
        ):
            (work.path / left).parent.mkdir(exist_ok=True, parents=True)
            (work.path / left).write_text("{}")
        work.begin({"fine-tune": "a"})
        assert len(list(work.path.rglob("*.*"))) == 5
        work.begin({"fine-tune": "b"})
        assert {path.name for path in work.path.rglob("*")} == {"lock", "job.json", "artefact", "records"}


def test_a_killed_cleanup_leaves_no_other_job_s_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(path: Path) -> None:
        raise Stopped

    with work_folder(tmp_path / "out") as work:
        work.begin({"fine-tune": "a"})
        (work.artefact / "layer-00000.safetensors").touch()
        with monkeypatch.context() as patched:
            patched.setattr("shutil.rmtree", killed)
            with pytest.raises(Stopped):
                work.begin({"fine-tune": "b"})
        work.begin({"fine-tune": "a"})
        assert not list(work.artefact.iterdir())


@pytest.mark.parametrize("name", ["layer-00009.safetensors", "layer-00009.safetensors.partial"])
def test_files_without_a_record_are_not_published(tmp_path: Path, base: Path, tuned: Path, name: str) -> None:
    out = tmp_path / "out"
    stop_at(Job(base, tuned, out, magnitude()), "embedding")
    (hidden(out) / "artefact" / name).write_bytes(b"half of a tensor")
    compress(Job(base, tuned, out, magnitude()))
    compress(Job(base, tuned, tmp_path / "undisturbed", magnitude()))
    assert contents(out) == contents(tmp_path / "undisturbed")


def test_a_removed_file_is_made_again_as_a_whole(
    tmp_path: Path, base: Path, tuned: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed when it was published already; then it is removed; and its repetition is stopped as well."""
    job = Job(base, tuned, tmp_path / "out", magnitude())
    with monkeypatch.context() as patched:
        patched.setattr(WorkFolder, "discard", stopped)
        with pytest.raises(Stopped):
            compress(job)
    shutil.rmtree(job.out)
    stop_at(job, "layer 1")
    compress(job)
    compress(replace(job, out=tmp_path / "undisturbed"))
    assert contents(job.out) == contents(tmp_path / "undisturbed")


def stopped(work: WorkFolder) -> None:
    raise Stopped


def test_layers_of_two_versions_or_devices_do_not_mix(
    tmp_path: Path, base: Path, tuned: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stop_at(Job(base, tuned, tmp_path / "out", magnitude()), "layer 1")
    with monkeypatch.context() as newer:
        newer.setattr("workers.compression.job.METHODS", 3)
        with pytest.raises(CheckpointError, match=r"unfinished.*methods 2 \(now 3\)"):
            compress(Job(base, tuned, tmp_path / "out", magnitude()))
    assert job_module.computed_by("cuda:1") == job_module.computed_by("cuda") == "cuda, bfloat16"
    work = hidden(tmp_path / "out") / "job.json"  # as a GPU would have left it
    work.write_text(work.read_text().replace(job_module.computed_by("cpu"), job_module.computed_by("cuda")))
    with pytest.raises(CheckpointError, match=r"unfinished.*cuda, bfloat16 \(now cpu, float32\)"):
        compress(Job(base, tuned, tmp_path / "out", magnitude()))


def test_a_start_without_a_finished_layer_leaves_nothing(tmp_path: Path, base: Path, tuned: Path) -> None:
    stop_at(Job(base, tuned, tmp_path / "out", magnitude()), "layer 0 of 2")
    assert list(tmp_path.iterdir()) == []


def test_a_second_process_is_refused(tmp_path: Path, base: Path, tuned: Path) -> None:
    out = tmp_path / "out"
    with work_folder(out), pytest.raises(CheckpointError, match=rf"process {os.getpid()} is compressing"):
        compress(Job(base, tuned, out, magnitude()))
    assert not out.exists()
    compress(Job(base, tuned, out, magnitude()))
    assert out.is_dir()


def test_a_disk_that_refuses_keeps_what_is_finished(
    tmp_path: Path, base: Path, tuned: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The eight syncs of a file's and a folder's are of what the job is, what was checked, layer 0 and its
    record."""
    out, fsync, left, seen = tmp_path / "out", os.fsync, [8], list[str]()

    def full(handle: int) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise OSError(28, "No space left on device")
        fsync(handle)

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        with pytest.raises(CheckpointError, match=r"No space left.*continues where it stopped"):
            compress(Job(base, tuned, out, magnitude()))
    compress(Job(base, tuned, out, counted(magnitude(), seen)))
    assert {name.split(".")[2] for name in seen} == {"1"}
