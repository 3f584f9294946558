"""A model that is deployed by its name and an intent: what is chosen, why, and whether it is right.

    python -m benchmarks.chosen_sizes --work FOLDER --out RESULT.json
        [--shape llama-3.1-8b] [--ask '{"intent": "minLat"}'] [--batches 1,8,32,128] [--later-rank 64]

It runs on one host without Ray, by the control plane's own code: `commands.deploy_model` takes the request,
and `GroupActions` places and launches the engine (with made-up weights), which reports what its ranks take
compared with their plan. Then TTFT and TPOT of each batch are measured, next to the estimates. At last a LoRA
adapter of `--later-rank` on all linear layers is registered and deployed: it is served, waits for new
engines, or is refused. Without a GPU the CPU serves. On an H200 the run takes about four minutes.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import os
import shlex
import signal
import socket
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import gpu_engine, rehearsing
from benchmarks.chosen_sizes.experiment import Experiment
from benchmarks.chosen_sizes.host import Children, Host, rates_of
from benchmarks.chosen_sizes.telling import BEGAN_S, tell
from benchmarks.profiling import shapes
from controlplane.settings import Settings
from controlplane.state.repository import Repository
from controlplane.state.stores import open_store

WITHIN = 0.02


async def carry_out(given: argparse.Namespace, result: dict[str, Any]) -> None:
    """Fills `result` as it goes; every process that was started has ended then."""
    children, task = Children(given.work / "logs"), asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    try:
        async with asyncio.timeout(given.limit_s):
            await _carry_out(given, children, result)
    finally:
        tell("ending all processes")
        result["killed"] = await children.end_all()


async def _carry_out(given: argparse.Namespace, children: Children, result: dict[str, Any]) -> None:
    chosen: dict[str, Any] = {"engine": "echo"} if rehearsing.is_rehearsal() else {}
    settings = Settings(home=given.work, allowed_roots=str(given.work), **chosen)
    rates = await rates_of(socket.gethostname(), children)
    result["devices"] = [dataclasses.asdict(d) for d in rates.devices]
    store = open_store(settings.resolved_store_url)
    experiment = Experiment(given, settings, Repository(store), Host(settings, rates, children, given.work))
    try:
        await experiment.deploy(given.shape, given.shape, 1, result)
        ratios = [rank["ratio"] for rank in result["ranks"]]
        result["memory_within"] = all(abs(ratio - 1) <= WITHIN for ratio in ratios) if ratios else None
        tell(f"measured over planned memory by rank: {ratios}")
        await experiment.measure(given.shape, given.shape, result)
        if given.later_rank:
            await experiment.deploy_later(given.shape, given.shape, given.later_rank, result)
    finally:
        store.close()


def options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = rehearsing.parser(__doc__)
    parser.add_argument("--work", type=Path, required=True, help="a folder that is not there yet")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--shape", default="llama-3.1-8b", choices=tuple(shapes.SHAPES))
    parser.add_argument("--ask", default='{"intent": "minLat"}', help="of the deployment, beside its name")
    parser.add_argument("--later-rank", type=int, default=64)
    parser.add_argument("--input-tokens", type=int, default=128)
    parser.add_argument("--output-tokens", type=int, default=64)
    parser.add_argument("--batches", type=_numbers, default=[1, 8, 32, 128])
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--tokens-below", type=int, default=32000, help="of prompts")
    parser.add_argument("--settle-s", type=float, default=2.0, help="before the decision")
    parser.add_argument("--limit-s", type=float, default=290.0, help="for all but the ending of processes")
    return parser.parse_args(argv)


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",") if number]


def main(argv: Sequence[str] | None = None) -> None:
    given = options(argv)
    given.work = given.work.absolute()
    given.work.mkdir(parents=True)
    given.tokenizer = given.work / "tokenizer"
    given.tokenizer.mkdir()
    words = shapes.SHAPES[given.shape]["vocab_size"]
    gpu_engine.write_tokenizer(given.tokenizer / gpu_engine.TOKENIZER, words)
    command = rehearsing.command("benchmarks.chosen_sizes", argv)
    result: dict[str, Any] = {"command": command, "host": os.uname().nodename}
    try:
        asyncio.run(carry_out(given, result))
    except BaseException as e:
        result["problem"] = f"{type(e).__name__}: {e}"
        raise
    finally:
        result["seconds"] = time.monotonic() - BEGAN_S
        rehearsing.write_result(given.out, result)


def rehearse(folder: Path) -> None:
    """A tiny model on this host's CPU, whose engine echoes; a larger rank than it takes needs new engines."""
    out = folder / "chosen_sizes.json"
    paths = ["--work", str(folder / "work"), "--out", str(out)]
    main([*paths, *shlex.split("--shape tiny --settle-s 0 --batches ''")])
    found = rehearsing.check(out, "plan", "devices", "later")
    assert "context 8,192 (the model's limit)" in found["plan"]["reason"]
    assert "for LoRA adapters up to rank 64" in found["later"]["new_engines"][0]


if __name__ == "__main__":
    rehearsing.run(main, rehearse)
