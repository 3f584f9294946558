"""Compresses the fine-tunes by every method and judges what comes out.

    python -m benchmarks.compression.quality BASE FINETUNES --work FOLDER --result FILE [--device cuda]
        [--tasks arithmetic,cipher] [--only "deltamix-1/16;bitdelta"] [--limit-s 540]

FINETUNES is what `benchmarks.compression.train` wrote. Every cell (a fine-tune and a method) is compressed by
`workers.compression.job`, calibrated on examples of the task's training, merged with the base, and then
answers the task's held-out examples. KL is that of the fine-tune's next token to the compressed model's, in
nats, over the true answers. Rows of the fine-tune itself, of the base (without examples, and with eight) and
of LoRA are among them. For seed 0 there are ablations: DeltaMix without its reconstruction target correction
and with the paper's own settings, calibration on the bundled text, and DeltaMix on the LoRA adapter.

The command takes the cells in order, the most important first, and does not repeat cells that are done.
"""

from __future__ import annotations

import argparse
import functools
import json
import shutil
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks import rehearsing
from benchmarks.compression import contenders, models
from benchmarks.compression.labels import BASE, BASE_SHOWN, BUNDLED, FINETUNE, LORA, REFERENCES, TASK_TEXTS
from benchmarks.compression.tasks import Example, Task, task_named
from workers.compression.job import CalibrationOptions, Job, compress
from workers.compression.result import Result
from workers.deltas.merge import merge

MODULE = "benchmarks.compression.quality"
SHOWN = 8
CALIBRATION_ROWS = 1024  # an example each
COMPARED = 200  # held-out examples over which the divergence is taken
Row = dict[str, Any]
GENERAL = ("deltacompress-2", "deltamix-1/16")


@dataclass(frozen=True)
class Cell:
    """`method` is a contender's label or one of the references'. `calibration`: `task` or the bundled text.
    `adapter`: it is this LoRA adapter that is judged, or compressed."""

    finetune: str
    task: str
    seed: int
    method: str
    calibration: str = TASK_TEXTS
    adapter: str | None = None

    @property
    def name(self) -> str:
        more = ("-bundled" if self.calibration == BUNDLED else "") + (f"-of-{LORA}" if self.adapter else "")
        return f"{self.finetune}-{self.method}{more}".replace("/", "_").replace(" ", "_").replace(",", "")


def cells(finetunes: Path, tasks: Sequence[str] | None, labels: str | None) -> list[Cell]:
    """By importance: the first seed, what the correction does for it, the other seeds, LoRA, the other
    ablations."""
    runs = [json.loads(path.read_text()) for path in sorted(finetunes.glob("*.json"))]
    full = [run for run in runs if run["rank"] is None and (tasks is None or run["task"] in tasks)]
    first, more = ([run for run in full if (run["seed"] == 0) == is_first] for is_first in (True, False))
    main = [*REFERENCES, *contenders.chosen(labels, [*contenders.OURS])]
    found = _grid(first, main)
    found += _grid(first, contenders.CORRECTION if labels is None else ())
    for seed in sorted({run["seed"] for run in more}):
        found += _grid([run for run in more if run["seed"] == seed], main)
    found += [cell for run in full for cell in _of_adapter(run, runs)]
    if labels is None:
        found += _grid(first, [label for label in contenders.ABLATIONS if label not in contenders.CORRECTION])
        found += _grid(first, GENERAL, BUNDLED)
    return found


def _grid(runs: Sequence[Row], methods: Sequence[str], calibration: str = TASK_TEXTS) -> list[Cell]:
    return [Cell(run["name"], run["task"], run["seed"], m, calibration) for m in methods for run in runs]


def _of_adapter(run: Row, runs: Sequence[Row]) -> Iterator[Cell]:
    """The best adapter for the same task and seed, as it is and compressed."""
    fitting = [r for r in runs if r["rank"] and (r["task"], r["seed"]) == (run["task"], run["seed"])]
    if fitting:
        best = max(fitting, key=lambda r: float(r["accuracy"]))["name"]
        yield Cell(run["name"], run["task"], run["seed"], LORA, adapter=best)
        yield from (Cell(run["name"], run["task"], run["seed"], m, adapter=best) for m in contenders.ADAPTERS)


@dataclass(frozen=True)
class Judge:
    """The places of all parts, and the amount of work."""

    base: Path
    finetunes: Path
    work: Path
    device: str
    tested: int

    def row(self, cell: Cell) -> dict[str, Any]:
        """One cell's figures; what it wrote is removed."""
        folder = self.work / cell.name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        try:
            began = time.perf_counter()
            made, facts = self._made(cell, folder)
            return {
                **asdict(cell),
                **facts,
                **self._judged(cell, made),
                "cell_s": time.perf_counter() - began,
            }
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _made(self, cell: Cell, folder: Path) -> tuple[Path, dict[str, Any]]:
        """A checkpoint to judge, and what making it cost."""
        if cell.method in (BASE, BASE_SHOWN):
            return self.base, {}
        if cell.method == FINETUNE:
            return self.finetunes / cell.finetune, {
                "size_bytes": _weights_bytes(self.finetunes / cell.finetune)
            }
        if cell.method == LORA:
            assert cell.adapter
            adapter = self.finetunes / cell.adapter
            merge(self.base, adapter, folder / "merged")
            return folder / "merged", {"size_bytes": _weights_bytes(adapter)}
        result = self._compressed(cell, folder)
        if result.spec is None:
            return result.folder, _facts(result)
        merge(self.base, result.folder, folder / "merged")
        return folder / "merged", _facts(result)

    def _compressed(self, cell: Cell, folder: Path) -> Result:
        options = CalibrationOptions()
        if cell.calibration != BUNDLED:
            options = CalibrationOptions(_texts(task_named(cell.task), cell.seed, folder), CALIBRATION_ROWS)
        method = contenders.method(cell.method)
        source = self.finetunes / (cell.adapter or cell.finetune)
        job = Job(self.base, source, folder / "compressed", method, options, self.device, force=True)
        return compress(job)

    def _judged(self, cell: Cell, made: Path) -> dict[str, Any]:
        task = task_named(cell.task)
        model, tokenizer = models.load(made, self.device)
        held_out = task.held_out(cell.seed, self.tested)
        shown = task.train(cell.seed, SHOWN) if cell.method == BASE_SHOWN else []
        found = {
            "accuracy": models.accuracy(model, tokenizer, held_out, task.tokens, shown),
            "tested": len(held_out),
        }
        if cell.method not in (FINETUNE, BASE_SHOWN):  # the true answers follow no examples
            tokens = models.tokenized(tokenizer, held_out[:COMPARED])
            found["kl"] = models.divergence(self._reference(cell), model, tokens)
        return found

    def _reference(self, cell: Cell) -> Any:
        return _loaded(self.finetunes / cell.finetune, self.device)


@functools.lru_cache(maxsize=1)
def _loaded(folder: Path, device: str) -> Any:
    return models.load(folder, device)[0]


def _texts(task: Task, seed: int, folder: Path) -> Path:
    """Examples as training had them, one a line."""

    def line(example: Example) -> str:
        return json.dumps({"text": example.prompt + example.answer})

    path = folder / "calibration.jsonl"
    path.write_text("\n".join(map(line, task.train(seed, CALIBRATION_ROWS))) + "\n")
    return path


def _facts(result: Result) -> dict[str, Any]:
    errors = list(result.layer_errors.values())
    return {
        "size_bytes": result.size_bytes,
        "table_bytes": result.table_bytes,
        "ratio": result.ratio,
        "ratio_without_tables": result.ratio_without_tables,
        "layer_errors": dict(result.layer_errors),
        "layer_error": sum(errors) / len(errors) if errors else None,
        "compress_s": result.seconds,
        "peak_device_bytes": result.peak_device_bytes,
        "warnings": list(result.warnings),
    }


def _weights_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Compress fine-tunes by every method, and judge them.")
    parser.add_argument("base", type=Path)
    parser.add_argument("finetunes", type=Path)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--result", type=Path)
    parser.add_argument("--tasks", help="with commas between; all that were learned without")
    parser.add_argument("--only", help="labels of contenders, with semicolons between")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--limit-s", type=float, default=float("inf"))
    parser.add_argument("--tested", type=int, default=500, help="examples that measure accuracy")
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    given = parser().parse_args(argv)
    tasks = None if given.tasks is None else given.tasks.split(",")
    wanted = cells(given.finetunes, tasks, given.only)
    given.work.mkdir(parents=True, exist_ok=True)
    judge = Judge(given.base, given.finetunes, given.work, given.device, given.tested)
    _work(wanted, judge, time.monotonic() + given.limit_s)
    rows = [
        json.loads(path.read_text()) for cell in wanted if (path := given.work / f"{cell.name}.json").exists()
    ]
    record = {
        "command": rehearsing.command(MODULE, argv),
        "base": given.base.name,
        "device": models.device_name(given.device),
        "cells": len(wanted),
        "rows": rows,
    }
    if given.result:
        rehearsing.write_result(given.result, record)
    for row in rows:
        print(_line(row))
    print(f"{len(rows)} of {len(wanted)} cells done")


def _work(wanted: Sequence[Cell], judge: Judge, ends_s: float) -> None:
    """Judge the cells that are missing. A failure prints its traceback and stops no other cell."""
    for cell in wanted:
        path = judge.work / f"{cell.name}.json"
        if path.exists() or time.monotonic() > ends_s:
            continue
        try:
            row = judge.row(cell)
        except Exception:  # the cells after it are worth having
            traceback.print_exc()
            continue
        rehearsing.write_result(path, row)
        print(_line(row), flush=True)


def _line(row: dict[str, Any]) -> str:
    size = f"{row['size_bytes'] / 1e6:7.1f} MB" if "size_bytes" in row else " " * 10
    kl = f"KL {row['kl']:.4f}" if "kl" in row else ""
    error = f"layer error {row['layer_error']:.4f}" if row.get("layer_error") is not None else ""
    what = row["method"] + (f" ({row['calibration']})" if row["calibration"] == BUNDLED else "")
    what += " of LoRA" if row["adapter"] and row["method"] != LORA else ""
    return f"{row['task']:12} {row['seed']} {what:40} accuracy {row['accuracy']:.3f} {size} {kl} {error}"


def rehearse(folder: Path) -> None:
    """Two methods of unlike kinds on a tiny fine-tune, and its LoRA adapter."""
    from benchmarks.compression import train

    base, finetunes = models.write_tiny(folder / "base"), folder / "runs"
    common = ["--device", "cpu", "--tested", "4"]
    train.main([str(base), "--out", str(finetunes), "--plan", "rehearsal", *common])
    result = folder / "quality.json"
    arguments = [str(base), str(finetunes), "--work", str(folder / "work"), "--result", str(result), *common]
    main([*arguments, "--tasks", "facts-20", "--only", "deltamix-1/16;sparse-gpt-4"])
    record = rehearsing.check(result, "rows")
    by_method = {(row["method"], row["adapter"] is None): row for row in record["rows"]}
    assert len(by_method) == record["cells"] == 7
    assert by_method["deltamix-1/16", True]["layer_error"] < 1
    assert by_method[FINETUNE, True]["size_bytes"] > by_method["deltamix-1/16", True]["size_bytes"]


if __name__ == "__main__":
    rehearsing.run(main, rehearse)
