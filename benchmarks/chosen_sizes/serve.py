"""The processes of `benchmarks.chosen_sizes`: an engine that serves and measures itself, and what
probes the devices. Each ends with its standard input.

    python -m benchmarks.chosen_sizes.serve engine CONFIG.json
    python -m benchmarks.chosen_sizes.serve probe NODE

They answer in JSON lines on their standard output; each line with an `Order` lets an engine measure.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from pydantic import TypeAdapter

from benchmarks.worker_with_loras import Answered, completion
from controlplane.settings import gpus_of
from workers.group import processes
from workers.messages import EngineConfig, VariantRef

REHEARSED_BY = "benchmarks.chosen_sizes"
GIB = 2**30
END_S = 60.0  # to end in order, before whatever is left is killed
FIRST_TOKEN = 100  # of a prompt: those below may be special

Say = Callable[[dict[str, Any]], None]


@dataclass(frozen=True)
class Order:
    """An order to measure: `batch` requests at once, `repeats` times after one to warm up. Tokens of prompts
    are below `tokens_below`. `variant` is one of the model's, by the fields of a `VariantRef`, loaded
    before."""

    batch: int
    input_tokens: int
    output_tokens: int
    repeats: int
    tokens_below: int
    variant: dict[str, Any] | None = None


def outlet() -> Say:
    """Answers go where the standard output goes; whatever else writes to that goes to the log instead."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def say(answer: dict[str, Any]) -> None:
        answers.write(json.dumps(answer) + "\n")
        answers.flush()

    return say


# --- an engine --------------------------------------------------------------------------------------------


def entitle(group: str) -> None:
    """The title that Ray Serve would give this process: by it the agent knows whose memory it has. To be
    called before anything changes the environment, else the title silently stays as it is."""
    import setproctitle

    title = f"ray::ServeReplica:model-{group}:benchmark"
    setproctitle.setproctitle(title)
    if not " ".join(psutil.Process().cmdline()).startswith(title):
        raise RuntimeError(f"expected the process to be called {title!r}; its title cannot be set here")


async def serve(config: EngineConfig, say: Say) -> None:
    """Start the engine, say what it takes, and measure as ordered until the standard input ends."""
    from workers.server.worker import Worker

    worker, orders = Worker(config, "127.0.0.1"), asyncio.Queue[str]()
    started = threading.Event()

    def at_end() -> None:
        if not started.is_set():
            worker.abort("nobody waits for it any more")

    _listen(asyncio.get_running_loop(), orders, at_end)
    began_s = time.perf_counter()
    await worker.start()
    started.set()
    start_s = time.perf_counter() - began_s
    try:
        say({"start_s": start_s, "report": asdict(await worker.report())})
        while line := await orders.get():
            say(await measure(worker, config.name, Order(**json.loads(line))))
    finally:
        await worker.close()


def _listen(loop: asyncio.AbstractEventLoop, orders: asyncio.Queue[str], at_end: Callable[[], None]) -> None:
    """Queue the lines of the standard input, then an empty one. What does not end in time then is killed."""

    def listen() -> None:
        for line in sys.stdin:
            loop.call_soon_threadsafe(orders.put_nowait, line)
        loop.call_soon_threadsafe(orders.put_nowait, "")
        at_end()
        time.sleep(END_S)
        processes.end(processes.children())
        os._exit(1)

    threading.Thread(target=listen, name="orders", daemon=True).start()


async def measure(worker: Any, name: str, order: Order) -> dict[str, Any]:
    """Medians over repeats of the mean over a batch's requests, which is what is estimated."""
    rounds: list[list[Answered]] = []
    variant = VariantRef(**order.variant) if order.variant else None
    if variant is not None:
        await worker.load_variant(variant)
    for repeat in range(order.repeats + 1):
        rng = np.random.default_rng((order.batch, repeat))
        prompts = rng.integers(FIRST_TOKEN, order.tokens_below, (order.batch, order.input_tokens))
        jobs = [completion(worker, name, prompt.tolist(), order.output_tokens, variant) for prompt in prompts]
        rounds.append(await asyncio.gather(*jobs))
    counted = rounds[1:]
    answers = [answer for answered in counted for answer in answered]
    return {
        "batch": order.batch,
        "requests": len(answers),
        "output_tokens": sorted({len(answer.tokens) for answer in answers}),
        "ttft_s": statistics.median(statistics.fmean(a.ttft_s for a in one) for one in counted),
        "ttft_last_s": statistics.median(max(a.ttft_s for a in one) for one in counted),
        "tpot_s": statistics.median(statistics.fmean(a.tpot_s for a in one) for one in counted),
    }


# --- the others -------------------------------------------------------------------------------------------


def measure_devices(node: str, say: Say) -> None:
    """Those that are ours. Also finds out at once whether engines can have their titles."""
    from controlplane.settings import Settings
    from workers.agent.device_rates import probe

    entitle("probe")
    say(asdict(probe(node, gpus_of(Settings().gpus, node))))


def _serve(path: Path, say: Say) -> None:
    config = TypeAdapter(EngineConfig).validate_json(path.read_text())
    entitle(config.group_name)
    try:
        asyncio.run(serve(config, say))
    except Exception as e:
        traceback.print_exc()
        say({"problem": f"{type(e).__name__}: {e}"})
        raise SystemExit(1) from e
    finally:
        processes.end(processes.children())


def main() -> None:
    what, *given = sys.argv[1:]
    if what == "engine":
        _serve(Path(given[0]), outlet())
    elif what == "probe":
        measure_devices(given[0], outlet())
    else:
        raise SystemExit(f"expected engine or probe, got {what!r}")


if __name__ == "__main__":
    main()
