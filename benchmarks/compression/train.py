"""Makes the fine-tunes that compression is judged on: several trainings side by side on one GPU.

    python -m benchmarks.compression.train BASE --out FOLDER --result FILE [--plan main] [--device cuda]

BASE is a Hugging Face folder (`python -m workers.bundled smollm2-135m-instruct DIR` makes one). FOLDER gets a
checkpoint or an adapter of each run, FILE the recipe and the accuracy of every run, none of the weights.
Runs that are done already are not done again, so the command can be given until all are there; those that are
under way at --limit-s are ended and start anew.

Plans (tokens of a run are the same for all weights and for LoRA):
- `main`: all weights and LoRA of rank 16, three seeds a task; on the facts LoRA with three learning rates,
  and tables of half and twice the size. --lora-lr is for the others.
- `gemma`: one task, all weights and LoRA, one seed.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from benchmarks import rehearsing
from benchmarks.compression import models
from benchmarks.compression.recipe import RANK, Run, carry_out

MODULE = "benchmarks.compression.train"
MILLION = 10**6
FACTS = "facts-8000"
# By task, the tokens of a run.
TOKENS = {"arithmetic": 6 * MILLION, "cipher": 4 * MILLION, "sorting": 5 * MILLION, FACTS: 6 * MILLION}
SIZES = ("facts-4000", "facts-16000")
SEEDS = (0, 1, 2)
FULL_LR = 5e-4
LORA_LR = 1e-3
LORA_LRS = (5e-4, 1e-3, 2e-3)
POLL_S = 0.2


def main_plan(lora_lr: float) -> list[Run]:
    """What matters most comes first: the time may end."""
    first = [Run(task, 0, FULL_LR, tokens) for task, tokens in TOKENS.items()]
    rates = [lora(run, lr) for run in first if run.task == FACTS for lr in LORA_LRS]
    more = [replace(run, seed=seed) for seed in SEEDS[1:] for run in first]
    sizes = [Run(task, 0, FULL_LR, TOKENS[FACTS]) for task in SIZES]
    facts = [run for run in more if run.task == FACTS]
    others = [run for run in (*first, *more) if run.task != FACTS]
    adapters = [lora(run, lora_lr) for run in (*facts, *others[:3], *sizes, *others[3:])]
    return [*first, *rates, *more, *sizes, *adapters]


def gemma_plan(lora_lr: float) -> list[Run]:
    full = Run("cipher", 0, 2e-4, TOKENS["cipher"], batch_tokens=4096)
    return [full, lora(full, lora_lr)]


def rehearsal_plan(lora_lr: float) -> list[Run]:
    full = [Run(task, 0, 1e-2, 4096, batch_tokens=1024) for task in ("cipher", "facts-20")]
    return [*full, lora(full[1], lora_lr)]


PLANS = {"main": main_plan, "gemma": gemma_plan, "rehearsal": rehearsal_plan}


def lora(run: Run, lr: float) -> Run:
    return replace(run, lr=lr, rank=RANK)


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Train the fine-tunes that compression is judged on.")
    parser.add_argument("base", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--result", type=Path)
    parser.add_argument("--plan", choices=PLANS, default="main")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--parallel", type=int, default=4, help="runs side by side on the device")
    parser.add_argument("--lora-lr", type=float, default=LORA_LR)
    parser.add_argument("--limit-s", type=float, default=float("inf"))
    parser.add_argument("--tested", type=int, default=500, help="examples that measure a run's accuracy")
    parser.add_argument("--run", type=json.loads, help=argparse.SUPPRESS)  # one run, in this process
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    given = parser().parse_args(argv)
    if given.run is not None:
        run = Run(**given.run)
        row = carry_out(run, given.base, given.out / run.name, given.device, given.tested)
        rehearsing.write_result(given.out / f"{run.name}.json", row)
        return
    given.out.mkdir(parents=True, exist_ok=True)
    plan = PLANS[given.plan](given.lora_lr)
    _all(plan, given)
    rows = [row for run in plan if (row := _done(run, given.out)) is not None]
    record = {
        "command": rehearsing.command(MODULE, argv),
        "base": given.base.name,
        "device": models.device_name(given.device),
        "parallel": given.parallel,
        "missing": [run.name for run in plan if _done(run, given.out) is None],
        "rows": rows,
    }
    if given.result:
        rehearsing.write_result(given.result, record)
    for row in rows:
        found = f"accuracy {row['accuracy']:.3f} loss {row['loss_last']:.4f} in {row['train_s']:.0f} s"
        print(f"{row['name']:36} {found}")
    print(f"{len(rows)} of {len(plan)} runs done")


def _all(plan: Sequence[Run], given: argparse.Namespace) -> None:
    """Run what is missing, so many side by side, until it is done or the time is over."""
    end = time.monotonic() + given.limit_s
    waiting = [run for run in plan if _done(run, given.out) is None]
    running: dict[str, subprocess.Popen[bytes]] = {}
    try:
        while (waiting or running) and time.monotonic() < end:
            while waiting and len(running) < given.parallel:
                run = waiting.pop(0)
                running[run.name] = _start(run, given)
            for name, process in [*running.items()]:
                if process.poll() is not None:
                    print(
                        f"{name}: {'done' if process.returncode == 0 else 'failed, see its log'}", flush=True
                    )
                    del running[name]
            time.sleep(POLL_S)
    finally:
        for process in running.values():
            process.kill()
            process.wait()


def _start(run: Run, given: argparse.Namespace) -> subprocess.Popen[bytes]:
    """A process of its own, which says what it says in a log beside the checkpoint."""
    shutil.rmtree(given.out / run.name, ignore_errors=True)  # of one that was ended
    options = ["--out", str(given.out), "--device", given.device, "--tested", str(given.tested)]
    command = [sys.executable, "-m", MODULE, str(given.base), *options, "--run", json.dumps(asdict(run))]
    with (given.out / f"{run.name}.log").open("wb") as log:
        return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)


def _done(run: Run, out: Path) -> dict[str, Any] | None:
    path = out / f"{run.name}.json"
    return json.loads(path.read_text()) if path.exists() else None


def rehearse(folder: Path) -> None:
    """Three runs on a tiny model, one of them an adapter; and again, when there is nothing left to do."""
    base = models.write_tiny(folder / "base")
    result = folder / "train.json"
    arguments = [str(base), "--out", str(folder / "runs"), "--result", str(result), "--plan", "rehearsal"]
    for _ in range(2):
        main([*arguments, "--device", "cpu", "--parallel", "2", "--tested", "4"])
    record = rehearsing.check(result, "rows")
    assert not record["missing"]
    assert len(record["rows"]) == 3
    assert all(row["loss_last"] < row["loss_first"] for row in record["rows"])


if __name__ == "__main__":
    rehearsing.run(main, rehearse)
