"""The figures of a running product's clients against its estimates: TTFT, TPOT and memory.

    python -m benchmarks.served_estimates --url http://127.0.0.1:8000 --base llama7b --variants lora1,lora2 \
        --out benchmarks/results/served_estimates.json

The base and the variants are deployed already. For each batch, requests are sent at once: to the base, and to
the base and all variants in turn. Each burst waits until the last has ended; texts are of words, so that the
tokenizer is on the way. TTFT is the mean of a burst's requests, as estimates mean it; the median of all
bursts is compared. Memory is what ranks took once their engine was ready, against what was planned for them.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from benchmarks import rehearsing
from controlplane.client.client import Client
from controlplane.management.schemas.common import IntervalView
from controlplane.management.schemas.estimates import EstimateRequest
from controlplane.runtime.path_probe import streamed

REHEARSED_BY = "benchmarks.gateway"
COLUMNS = ("asked", "batch", "what", "estimate", "low", "high", "measured", "inside")


@dataclass(frozen=True)
class Load:
    """`models` are asked in turn by `batch` requests at once, with `words` of text each."""

    models: tuple[str, ...]
    batch: int
    words: int
    output_tokens: int


async def bursts(url: str, load: Load, repeats: int) -> list[list[tuple[float, float]]]:
    """For each burst, each request's TTFT and mean time per token after it, ms."""
    found = []
    async with httpx.AsyncClient(base_url=url, timeout=120, trust_env=False) as http:
        for number in range(repeats + 1):
            asked = (
                _ask(http, load.models[i % len(load.models)], f"{number} {i}", load)
                for i in range(load.batch)
            )
            found.append(list(await asyncio.gather(*asked)))
    return found[1:]  # the first makes connections


async def _ask(http: httpx.AsyncClient, model: str, prefix: str, load: Load) -> tuple[float, float]:
    try:
        first_s, last_s = await streamed(http, {**_body(model, prefix, load), "stream": True})
    except RuntimeError as e:
        raise RuntimeError(f"{model}: {e}") from e
    return 1e3 * first_s, 1e3 * (last_s - first_s) / max(1, load.output_tokens - 1)


def _body(model: str, prefix: str, load: Load) -> dict[str, Any]:
    return {
        "model": model,
        "prompt": f"{prefix}{' word' * load.words}",
        "max_tokens": load.output_tokens,
        "temperature": 0,
        "ignore_eos": True,
    }


def prompt_tokens(url: str, load: Load) -> int:
    """The engine's count of a prompt's tokens."""
    body = _body(load.models[0], "0 0", load)
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=120, trust_env=False)
    answer.raise_for_status()
    return int(answer.json()["usage"]["prompt_tokens"])


def compare(url: str, client: Client, base: str, load: Load, repeats: int) -> list[dict[str, Any]]:
    """A row for TTFT and one for TPOT."""
    estimate = client.estimate(
        base,
        EstimateRequest(
            batch=load.batch,
            inputTokens=prompt_tokens(url, load),
            outputTokens=load.output_tokens,
            variants=[] if load.models == (base,) else list(load.models),
        ),
    )
    found = asyncio.run(bursts(url, load, repeats))
    ttft_ms = statistics.median(statistics.mean(ttft for ttft, _ in burst) for burst in found)
    tpot_ms = statistics.median(statistics.mean(tpot for _, tpot in burst) for burst in found)
    about = {"asked": ", ".join(load.models), "batch": load.batch, "basis": estimate.basis}
    told = {
        "engine_ttft_ms": _middle(estimate.engineTtftMs),
        "path_ms": _middle(estimate.pathMs),
        "notes": estimate.notes,
    }
    return [
        {**about, **_row("TTFT, ms", estimate.ttftMs, ttft_ms), **told},
        {**about, **_row("TPOT, ms", estimate.tpotMs, tpot_ms)},
    ]


def memory(client: Client, base: str) -> list[dict[str, Any]]:
    """A row for each rank: planned with the interval of its estimate, and what it took, GiB."""
    rows = []
    ranks = client.estimate(base, EstimateRequest()).ranks
    plan = client.deployment(base).plan
    for rank in plan.ranks if plan else ():
        if rank.measuredBytes is None or rank.rank >= len(ranks):
            continue
        total, gib = ranks[rank.rank].totalBytes, 1 / 2**30
        around = IntervalView(
            value=rank.memoryBytes * gib,
            low=(rank.memoryBytes + total.low - total.value) * gib,
            high=(rank.memoryBytes + total.high - total.value) * gib,
        )
        row = _row(f"memory of rank {rank.rank}, GiB", around, rank.measuredBytes * gib)
        rows.append({"asked": base, "batch": None, **row})
    return rows


def _row(what: str, estimate: IntervalView, measured: float) -> dict[str, Any]:
    return {
        "what": what,
        "estimate": round(estimate.value, 3),
        "low": round(estimate.low, 3),
        "high": round(estimate.high, 3),
        "measured": round(measured, 3),
        "inside": estimate.low <= measured <= estimate.high,
    }


def _middle(interval: IntervalView | None) -> float | None:
    return None if interval is None else round(interval.value, 3)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--base", required=True)
    parser.add_argument("--variants", default="", metavar="NAME,...", help="deployed on the base")
    parser.add_argument("--batches", default="1,8,32")
    parser.add_argument("--words", type=int, default=124)
    parser.add_argument("--output-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args(argv)
    variants = [name for name in given.variants.split(",") if name]
    mixes = [(given.base,), *([(given.base, *variants)] if variants else [])]
    rows: list[dict[str, Any]] = []
    with Client(given.url) as client:
        rows += memory(client, given.base)
        print(*_table(rows), sep="\n", flush=True)
        for models in mixes:
            for batch in map(int, given.batches.split(",")):
                load = Load(models, batch, given.words, given.output_tokens)
                rows += compare(given.url, client, given.base, load, given.repeats)
                print(*_table(rows[-2:]), sep="\n", flush=True)
    command = rehearsing.command("benchmarks.served_estimates", argv)
    rehearsing.write_result(given.out, {"command": command, "rows": rows})


def _table(rows: Sequence[dict[str, Any]]) -> list[str]:
    return [" | ".join(str(row[column]) for column in COLUMNS) for row in rows]


if __name__ == "__main__":
    main()
