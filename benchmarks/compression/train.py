"""Makes the fine-tunes that compression is judged on.

    python -m benchmarks.compression.train BASE --out FOLDER --result FILE [--plan three] [--device cuda]

BASE is a Hugging Face folder (`python -m workers.bundled smollm2-135m-instruct DIR` makes one). FOLDER gets a
checkpoint or an adapter of each run, FILE the recipe and the accuracy of every run, none of the weights.
The command does not repeat runs that are done, and begins none after --limit-s.

Plans (tokens of a run are the same for all weights and for LoRA):
- `three`: three tasks with all weights and three seeds; LoRA thrice on the facts, once on the others.
- `gemma`: one task, all weights and LoRA, one seed.
"""

from __future__ import annotations

import argparse
import json
import shutil
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks import rehearsing
from benchmarks.compression import models
from benchmarks.compression.recipe import RANK, Run, carry_out

MODULE = "benchmarks.compression.train"
MILLION = 10**6
# The tokens of a run, by task.
TOKENS = {"arithmetic": 6 * MILLION, "cipher": 3 * MILLION, "sorting": 4 * MILLION}
FACTS_TOKENS = 9 * MILLION // 2
FACTS = ("facts-4000", "facts-8000", "facts-16000")
LRS = {"full": 3e-4, "facts": 5e-4, "lora": 1e-3}


def task_run(task: str, seed: int) -> Run:
    """All weights."""
    if task.startswith("facts"):
        return Run(task, seed, LRS["facts"], FACTS_TOKENS)
    return Run(task, seed, LRS["full"], TOKENS[task])


def lora(run: Run, lr: float) -> Run:
    return replace(run, lr=lr, rank=RANK)


def three_plan(given: argparse.Namespace) -> list[Run]:
    """Three tasks with three seeds; LoRA as often on the facts, once on the other two."""
    full = [task_run(task, seed) for seed in (0, 1, 2) for task in (given.facts, "sorting", "cipher")]
    adapted = [run for run in full if run.seed == 0 or run.task == given.facts]
    return [*full, *(lora(run, given.lora_lr) for run in adapted)]


def gemma_plan(given: argparse.Namespace) -> list[Run]:
    full = replace(task_run("cipher", 0), lr=2e-4)
    return [full, lora(full, given.lora_lr)]


def rehearsal_plan(given: argparse.Namespace) -> list[Run]:
    full = Run("facts-20", 0, 1e-2, 4096, batch_tokens=1024)
    return [full, lora(full, 1e-2)]


PLANS = {
    "three": three_plan,
    "gemma": gemma_plan,
    "rehearsal": rehearsal_plan,
}


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Train the fine-tunes that compression is judged on.")
    parser.add_argument("base", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--result", type=Path)
    parser.add_argument("--plan", choices=PLANS, default="three")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--lora-lr", type=float, default=LRS["lora"])
    parser.add_argument("--facts", choices=FACTS, default=FACTS[1])
    parser.add_argument("--limit-s", type=float, default=float("inf"))
    parser.add_argument("--tested", type=int, default=500, help="examples that measure a run's accuracy")
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    given = parser().parse_args(argv)
    given.out.mkdir(parents=True, exist_ok=True)
    ends = time.monotonic() + given.limit_s
    missing = [run for run in PLANS[given.plan](given) if not (given.out / f"{run.name}.json").exists()]
    left = list[str]()
    for run in missing:
        if time.monotonic() > ends:
            left.append(run.name)
            continue
        shutil.rmtree(given.out / run.name, ignore_errors=True)  # of a run that was ended
        row = carry_out(run, given.base, given.out / run.name, given.device, given.tested)
        rehearsing.write_result(given.out / f"{run.name}.json", row)
    rows = [json.loads(path.read_text()) for path in sorted(given.out.glob("*.json"))]
    record = {
        "command": rehearsing.command(MODULE, argv),
        "base": given.base.name,
        "device": models.device_name(given.device),
        "missing": left,
        "rows": rows,
    }
    if given.result:
        rehearsing.write_result(given.result, record)
    for row in rows:
        found = f"accuracy {row['accuracy']:.3f} loss {row['loss_last']:.4f} in {row['train_s']:.0f} s"
        print(f"{row['name']:36} {found}")
    print(f"{len(rows)} runs are done, {len(left)} of the plan are not")


def rehearse(folder: Path) -> None:
    """Two runs on a tiny model, one of them an adapter; and again, when there is nothing left to do."""
    base = models.write_tiny(folder / "base")
    result = folder / "train.json"
    arguments = [str(base), "--out", str(folder / "runs"), "--result", str(result), "--plan", "rehearsal"]
    for _ in range(2):
        main([*arguments, "--device", "cpu", "--tested", "4"])
    record = rehearsing.check(result, "rows")
    assert not record["missing"]
    assert len(record["rows"]) == 2
    assert all(row["loss_last"] < row["loss_first"] for row in record["rows"])


if __name__ == "__main__":
    rehearsing.run(main, rehearse)
