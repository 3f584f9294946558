"""A small fine-tune compressed by `auto` within a measured loss; and what is measured, packed and resumed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from profiler.checkpoint import read_model
from profiler.evaluation.types import Answerer, Distribution, Pair, Scored, Settings
from profiler.variants.verifying import verify
from testkit.compression.small_finetune import (
    share_right,
    write_base,
    write_finetune,
    write_renamed,
    write_tasks,
    write_texts,
)
from workers.compression.auto import CANDIDATES, LossTooLarge
from workers.compression.choose import MethodName, OptionError, Options, method_of
from workers.compression.evaluated import torch_answerer
from workers.compression.job import CalibrationOptions, Job, compress
from workers.compression.request import Request
from workers.compression.run import run
from workers.compression.work_folder import OtherWork, WorkFolder
from workers.deltas.merge import merge

pytestmark = pytest.mark.slow

AUTO = Options(MethodName.auto)
MAGNITUDE = Options(MethodName.magnitude, bits=4)
SLOW_STORAGE = 1e-6  # MB/s


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders base and tuned, and files tasks.jsonl and texts.txt."""
    torch.set_num_threads(1)
    root = tmp_path_factory.mktemp("models")
    write_base(root / "base")
    write_finetune(root / "base", root / "tuned")
    write_tasks(root / "tasks.jsonl")
    write_texts(root / "texts.txt")
    return root


def request(models: Path, out: Path, options: Options = MAGNITUDE, **more: object) -> Request:
    texts = CalibrationOptions(models / "texts.txt", rows=64, tokens=16)
    asked = Request(models / "base", models / "tuned", out, options, texts, force=True)
    return replace(asked, **more)  # type: ignore[arg-type]


def share_of(models: Path, folder: Path) -> float:
    rows = [json.loads(line) for line in (models / "tasks.jsonl").read_text().splitlines()[1:]]
    return share_right(folder, [row["prompt"] for row in rows], [row["answer"] for row in rows])


def merged_share(models: Path, delta: Path, scratch: Path) -> float:
    merge(models / "base", delta, scratch)
    return share_of(models, scratch)


@pytest.fixture(scope="module")
def everything(models: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, float]]:
    """Every candidate of auto by itself: its size, and its loss in points by a loop of our own."""
    found, root = {}, tmp_path_factory.mktemp("everything")
    before = share_of(models, models / "tuned")
    assert before > 0.9
    for candidate in CANDIDATES:
        asked = request(models, root / candidate.name)
        job = Job(
            asked.base, asked.tuned, asked.out, method_of(candidate.options), asked.calibration, force=True
        )
        made = compress(job)
        assert made.spec is not None
        shapes = read_model(asked.base).linear_shapes.values()
        dense_bytes = 2 * sum(out * into for out, into in shapes) * 2  # of two layers
        assert made.spec.weight_bytes - made.spec.full_bytes >= candidate.least_share * dense_bytes
        size = made.size_bytes
        after = merged_share(models, asked.out, root / f"{candidate.name} merged")
        found[candidate.name] = (size, 100 * (before - after))
    return found


def test_auto_finds_the_smallest_within_each_loss(
    models: Path, everything: dict[str, tuple[int, float]], tmp_path: Path
) -> None:
    """The result equals trying everything. The limits are those at which the choice changes."""
    for max_loss in sorted({max(loss, 0.0) for _, loss in everything.values()}):
        out = tmp_path / f"{max_loss}"
        report = run(request(models, out, AUTO, evaluation=models / "tasks.jsonl", max_loss=max_loss + 1e-9))
        within = [size for size, loss in everything.values() if loss <= max_loss + 1e-9]
        assert report.result.size_bytes == min(within)
        (quality,) = report.quality
        assert quality["value"] <= max_loss + 1e-9
        assert quality["after"] == pytest.approx(merged_share(models, out, tmp_path / f"{max_loss} merged"))
        for tried in report.tried:
            size, loss = everything[tried["name"]]
            assert tried["size_bytes"] == size
            assert not tried["losses"] or tried["losses"][0]["value"] == pytest.approx(loss)
        assert json.loads((out / "delta.json").read_text())["quality"] == json.loads(
            json.dumps(report.quality)
        )
        assert not list(tmp_path.glob(".*"))


class Counting:
    """A model whose answers are counted, and a model that loses a given amount."""

    def __init__(self, answerer: Answerer, log: list[int]) -> None:
        self._answerer, self._log = answerer, log

    def generate(self, prompts: Sequence[str], settings: Settings) -> list[str]:
        self._log.append(len(prompts))
        return self._answerer.generate(prompts, settings)

    def score(self, pairs: Sequence[Pair]) -> list[Scored]:
        return self._answerer.score(pairs)

    def distributions(self, pairs: Sequence[Pair]) -> list[list[Distribution]]:
        return self._answerer.distributions(pairs)


def test_a_limit_that_no_candidate_keeps_is_reported_and_measurements_serve_other_limits(
    models: Path, tmp_path: Path
) -> None:
    log: list[int] = []

    def opened(folder: Path) -> Answerer:
        return Counting(torch_answerer("cpu")(folder), log)

    asked = request(models, tmp_path / "out", AUTO, evaluation=models / "tasks.jsonl", max_loss=-101.0)
    with pytest.raises(
        LossTooLarge, match=r"every compression loses more than -101; .*The smallest loss has .*next letters"
    ):
        run(asked, open_answerer=opened)
    assert len(log) == 1 + len(CANDIDATES)
    assert not asked.out.exists()
    report = run(replace(asked, max_loss=100.0), open_answerer=opened)
    assert len(log) == 1 + len(CANDIDATES)
    assert report.options == CANDIDATES[0].options
    assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize("stop_at", [0.1, 0.5])
def test_a_search_goes_on_where_it_stopped(models: Path, tmp_path: Path, stop_at: float) -> None:
    """No candidate is compressed, and no model asked, twice."""
    log: list[int] = []

    def opened(folder: Path) -> Answerer:
        return Counting(torch_answerer("cpu")(folder), log)

    def stop(share: float, what: str) -> None:
        if share >= stop_at:
            raise KeyboardInterrupt

    asked = request(models, tmp_path / "out", AUTO, evaluation=models / "tasks.jsonl", max_loss=-101.0)
    with pytest.raises(KeyboardInterrupt):
        run(asked, stop, opened)
    with pytest.raises(LossTooLarge) as interrupted:
        run(asked, open_answerer=opened)
    assert len(log) == 1 + len(CANDIDATES)
    with pytest.raises(LossTooLarge) as at_once:
        run(replace(asked, out=tmp_path / "other"))
    assert str(interrupted.value) == str(at_once.value)


def interrupt_at(asked: Request, words: str) -> None:
    """Run until this is said to come next."""

    def stop(share: float, what: str) -> None:
        if words in what:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(asked, stop)


@pytest.mark.parametrize(
    ("options", "more", "named"),
    [
        (MAGNITUDE, {"tuned": "other"}, "fine-tune"),
        (MAGNITUDE, {"options": replace(MAGNITUDE, group_size=16)}, "options"),
        (MAGNITUDE, {"calibration": CalibrationOptions(None, rows=2, tokens=8)}, "calibration"),
        (
            Options(MethodName.deltamix, ratio=0.25),
            {"options": Options(MethodName.deltamix, ratio=0.25, max_widths=1)},
            "options",
        ),
    ],
)
def test_files_of_another_command_are_not_published(
    models: Path, tmp_path: Path, options: Options, more: dict[str, object], named: str
) -> None:
    asked = request(models, tmp_path / "out", options, evaluation=models / "tasks.jsonl")
    interrupt_at(asked, "evaluating")
    if "tuned" in more:
        more = {"tuned": write_finetune(models / "base", tmp_path / "other", steps=5)}
    with pytest.raises(OtherWork, match=rf"unfinished compression into out with {named} "):
        run(replace(asked, **more))  # type: ignore[arg-type]
    assert not asked.out.exists()


def test_a_published_folder_that_was_removed_is_made_again(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(work: WorkFolder) -> None:
        if work.out == asked.out:
            raise KeyboardInterrupt
        discard(work)

    discard, asked = WorkFolder.discard, request(models, tmp_path / "out", evaluation=models / "tasks.jsonl")
    with monkeypatch.context() as patched:
        patched.setattr(WorkFolder, "discard", killed)
        with pytest.raises(KeyboardInterrupt):
            run(asked)
    first = {path.name: path.read_bytes() for path in asked.out.iterdir()}
    shutil.rmtree(asked.out)
    report = run(asked)
    assert report.result.spec is not None
    assert {path.name: path.read_bytes() for path in asked.out.iterdir()} == first


def test_any_method_s_quality_is_measured(models: Path, tmp_path: Path) -> None:
    report = run(request(models, tmp_path / "out", evaluation=models / "tasks.jsonl"))
    (quality,) = report.quality
    assert quality["before"] == pytest.approx(share_of(models, models / "tuned"))
    assert quality["after"] == pytest.approx(merged_share(models, tmp_path / "out", tmp_path / "merged"))
    assert report.options == MAGNITUDE
    assert not report.tried


def test_a_fine_tune_s_own_tokenizer_is_that_of_what_is_made_of_it(models: Path, tmp_path: Path) -> None:
    """The numbers of its letters are others, its linear layers the same: so are its answers."""
    renamed = write_renamed(models / "tuned", tmp_path / "renamed")
    tasks = models / "tasks.jsonl"
    (expected,) = run(request(models, tmp_path / "plain", evaluation=tasks)).quality
    (quality,) = run(request(models, tmp_path / "out", evaluation=tasks, tuned=renamed)).quality
    assert expected["after"] > 0.5
    assert (quality["before"], quality["after"]) == (expected["before"], expected["after"])


def test_a_checkpoint_s_quality_is_measured(models: Path, tmp_path: Path) -> None:
    """A method that no engine serves as a variant."""
    options = Options(MethodName.round_to_nearest, bits=4)
    report = run(request(models, tmp_path / "out", options, evaluation=models / "tasks.jsonl"))
    assert report.quality[0]["after"] == pytest.approx(share_of(models, tmp_path / "out"))


def test_files_are_packed_and_read_alike(models: Path, tmp_path: Path) -> None:
    plain = run(request(models, tmp_path / "plain"))
    packed = run(request(models, tmp_path / "packed", lossless=True, storage_mb_per_s=SLOW_STORAGE))
    verify(tmp_path / "packed")
    assert packed.lossless["compressed_files"] > 0
    assert packed.lossless["size_after_bytes"] < packed.lossless["size_before_bytes"]
    assert packed.result.spec == plain.result.spec
    files = {
        name: [
            (tmp_path / folder / file).stat().st_size
            for folder, file in (("plain", name), ("packed", stored))
        ]
        for name in json.loads((tmp_path / "plain" / "delta.json").read_text())["files"]
        for stored in (name, f"{name}.zst")
        if (tmp_path / "packed" / stored).exists()
    }
    saved = {name: before - after for name, (before, after) in files.items()}
    assert packed.result.size_bytes == plain.result.size_bytes - sum(saved.values())
    assert packed.result.table_bytes == plain.result.table_bytes - saved["full.safetensors"]
    assert packed.result.ratio > plain.result.ratio
    for name in ("plain", "packed"):
        merge(models / "base", tmp_path / name, tmp_path / f"{name} merged")
    file = "model.safetensors"
    assert (tmp_path / "packed merged" / file).read_bytes() == (tmp_path / "plain merged" / file).read_bytes()


def test_files_that_were_packed_before_a_kill_are_reported(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed when all is packed and nothing has its name; the same command ends as one that was not."""
    asked = request(models, tmp_path / "out", lossless=True, storage_mb_per_s=SLOW_STORAGE)
    expected = run(replace(asked, out=tmp_path / "at once"))

    def killed(source: Path, target: Path) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("workers.compression.run.rename", killed)
        with pytest.raises(KeyboardInterrupt):
            run(asked)
    report = run(asked)
    sizes = ("files", "compressed_files", "size_before_bytes", "size_after_bytes")
    assert [report.lossless[each] for each in sizes] == [expected.lossless[each] for each in sizes]
    assert report.result.size_bytes == expected.result.size_bytes


@pytest.mark.parametrize(
    ("more", "option"),
    [
        ({"options": AUTO, "max_loss": 1.0}, "evaluation"),
        ({"options": AUTO, "evaluation": Path("tasks.jsonl")}, "max_loss"),
        ({"max_loss": 1.0}, "max_loss"),
        ({"storage_mb_per_s": 5.0}, "storage_mb_per_s"),
        ({"storage_mb_per_s": 0.0, "lossless": True}, "storage_mb_per_s"),
        ({"options": Options(MethodName.bitdelta), "lossless": True}, "lossless"),
    ],
)
def test_options_that_do_not_go_together(
    models: Path, tmp_path: Path, more: dict[str, object], option: str
) -> None:
    with pytest.raises(OptionError) as refusal:
        run(request(models, tmp_path / "out", **more))  # type: ignore[arg-type]
    assert refusal.value.option == option


def test_a_waiting_user_sees_the_evaluation_in_the_log(models: Path, tmp_path: Path) -> None:
    told: list[tuple[float, str]] = []
    asked = request(models, tmp_path / "delta", evaluation=models / "tasks.jsonl")
    run(asked, lambda share, what: told.append((share, what)))
    shares, whats = [share for share, _ in told], [what for _, what in told]
    assert shares == sorted(shares)
    assert [what for what in whats if "done" in what] == ["done"]
    assert all(what.endswith("left, then the evaluation") for what in whats if " left" in what)
    for name in ("fine-tune", "magnitude-4bit"):
        begun = whats.index(f"loading {name}, to evaluate it")
        assert whats[begun + 1].startswith(f"evaluating {name}: task 1 of 1, ")
        assert whats[begun + 1].endswith("(150 items)")
