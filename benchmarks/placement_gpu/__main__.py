"""Several models on the GPUs of one host, placed and launched by the control plane's own code, without Ray.

    python -m benchmarks.placement_gpu --tokenizer FOLDER --work FOLDER --out RESULT.json
        [--models llama-2-7b,qwen2.5-14b] [--ballast 0:99,1:112] [--ask 'llama-2-7b={"intent":"minMem"}' ...]
        [--max-model-len 2048] [--concurrency 8] [--fingerprints FOLDER] [--limit-s 560]

Ballast (GPU:GiB) is held by processes of its own, so that large GPUs are like smaller ones. Then, for each
model in its turn: which even splits there is room for, where `GroupActions` places it, how its engine starts
(with made-up weights), and what its ranks take beside their plan. At last TTFT and TPOT of each model, while
all are up, beside the estimates: calibrated ones if there are fingerprints of its shape (as
`benchmarks.profiling` writes them). `--ask` adds to a model's deploy request what a user may say in it.
Without GPUs the CPU serves. Other settings are read from the environment, as the control plane reads them.
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
from benchmarks.placement_gpu.asking import named
from benchmarks.placement_gpu.experiment import Experiment
from benchmarks.placement_gpu.host import BALLAST_S, Children, Host, rates_of
from benchmarks.placement_gpu.serve import GIB
from benchmarks.placement_gpu.telling import BEGAN_S, table, tell
from controlplane import errors
from controlplane.settings import Settings
from controlplane.state.repository import Repository
from controlplane.state.stores import open_store
from workers.messages import NodeReport


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
    chosen: dict[str, Any] = {"max_model_len": given.max_model_len, "concurrency": given.concurrency}
    chosen |= {"engine": "echo"} if rehearsing.is_rehearsal() else {}
    settings = Settings(home=given.work, **chosen)
    rates = await rates_of(socket.gethostname(), children)
    told = settings.model_dump(mode="json", exclude={"api_key", "store_url", "home"})
    result |= {"settings": told, "rates": told_rates(rates)}
    await _hold(given.ballast, children)
    store = open_store(settings.resolved_store_url)
    host = Host(settings, rates, children, given.work)
    experiment = Experiment(given, settings, Repository(store), host)
    models: dict[str, dict[str, Any]] = result.setdefault("models", {})
    try:
        for number, (name, shape) in enumerate(named(given.models).items(), 1):
            models[name] = {"shape": shape}
            try:
                await experiment.deploy(name, shape, number, models[name])
            except errors.NoFeasiblePlan as e:
                models[name]["refused"] = e.message
                tell(f"{name}: {e.message}")
        for name, one in models.items():
            if "refused" not in one:
                await experiment.measure(name, one["shape"], one)
        result["after"] = await experiment.devices()
    finally:
        store.close()


async def _hold(ballast: Sequence[tuple[str, str]], children: Children) -> None:
    """Ballast stays until its process is ended."""
    held = [await children.start(f"ballast-{index}", "hold", index, gib) for index, gib in ballast]
    for child in held:
        told = await child.hear(BALLAST_S)
        tell(f"ballast: {told['bytes'] / GIB:.1f} GiB of {told['device']}")


def told_rates(rates: NodeReport) -> list[dict[str, Any]]:
    return [{**dataclasses.asdict(d), "engine": rates.engine_version} for d in rates.devices]


def options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True, help="a folder that is not there yet")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--models", default="llama-2-7b,qwen2.5-14b")
    parser.add_argument("--ask", action="append", default=[], metavar="MODEL=JSON")
    parser.add_argument("--ballast", type=_ballast, default=[], metavar="GPU:GIB,...")
    parser.add_argument("--fingerprints", type=Path)
    parser.add_argument("--max-model-len", type=int, default=2048)
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--input-tokens", type=int, default=128)
    parser.add_argument("--output-tokens", type=int, default=128)
    parser.add_argument("--batches", type=_numbers, default=[1, 8])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--tokens-below", type=int, default=32000, help="of prompts")
    parser.add_argument("--settle-s", type=float, default=5.0, help="before each decision")
    parser.add_argument("--limit-s", type=float, default=560.0, help="for all but the ending of processes")
    return parser.parse_args(argv)


def _ballast(text: str) -> list[tuple[str, str]]:
    return [(index, gib) for index, _, gib in (part.partition(":") for part in text.split(","))]


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",") if number]


def main(argv: Sequence[str] | None = None) -> None:
    given = options(argv)
    given.work = given.work.absolute()
    given.work.mkdir(parents=True)
    command = rehearsing.command("benchmarks.placement_gpu", argv)
    result: dict[str, Any] = {"command": command, "host": os.uname().nodename}
    try:
        asyncio.run(carry_out(given, result))
    except BaseException as e:
        result["problem"] = f"{type(e).__name__}: {e}"
        raise
    finally:
        result["seconds"] = time.monotonic() - BEGAN_S
        rehearsing.write_result(given.out, result)
    print(table(result["models"]))


def rehearse(folder: Path) -> None:
    """Two tiny models beside some ballast on this host's CPU; engines echo, and so are not measured."""
    tokenizer, out = folder / "tokenizer", folder / "placement_gpu.json"
    tokenizer.mkdir()
    gpu_engine.write_tokenizer(tokenizer / gpu_engine.TOKENIZER, 64)
    paths = ["--tokenizer", str(tokenizer), "--work", str(folder / "work"), "--out", str(out)]
    small = "--models tiny,tiny --ballast 0:0.05 --settle-s 0 --max-model-len 512 --concurrency 1"
    main([*paths, *shlex.split(small), "--batches", ""])
    models = rehearsing.check(out, "models", "rates", "after")["models"]
    assert set(models) == {"tiny", "tiny-2"}
    assert all(one["plan"]["layers_per_stage"] and one["even_splits"] for one in models.values())


if __name__ == "__main__":
    rehearsing.run(main, rehearse)
