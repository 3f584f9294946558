"""MaverIQ's figures 10 to 14: several LLMs on one server of eight A6000s, Azure's traces, several systems.

- 10: minimal latency for four models, both traces, four rates.
- 11: the same for eight smaller models, code trace, highest rate. 12: as 10, without compression.
- 13: the intents of least cost, memory and GPU hours. 14: 21 models, which of them find a place.

The text names the models of 10 (70B, 7B and two 40B, by what is deployed) and 11; those of 12 and 13 are
taken for the same as 10's, and the 21 of 14 are ours (`benchmarks.placement_instances`).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.placement_instances import FORMS, model, paper_models
from benchmarks.reproduction import serving, systems
from benchmarks.reproduction.site import RING_STEP_S, Site, paper_site
from benchmarks.reproduction.sizes import Size
from benchmarks.reproduction.systems import POLICIES, Judge, Placed
from benchmarks.reproduction.traffic import Traffic, thinned, trace
from placement.solver.request import Request
from placement.types import Intent

LARGE = ("llama-2-70b", "llama-2-7b", "falcon-40b", "falcon-40b")
SMALL = tuple(name for name in ("llama-2-13b", "llama-2-7b", "falcon-40b", "gpt-j-6b") for _ in range(2))
BASELINES = ("accelerate-like", "alpaserve-like", "alpaserve-like-all")
JUDGED = str(serving.SLO_FACTORS[1])
CONCURRENCY, CONTEXT = 8, 1024  # rows, and tokens of KV cache for each of them


def figure_10(data: Path, size: Size) -> list[dict[str, Any]]:
    return [
        row
        for name in ("code", "conversation")
        for share in size.shares
        for row in _compared(data, size, name, share, LARGE, [Intent.MIN_LATENCY])
    ]


def figure_11(data: Path, size: Size) -> list[dict[str, Any]]:
    return [*_compared(data, size, "code", size.shares[0], SMALL, [Intent.MIN_LATENCY])]


def figure_12(data: Path, size: Size) -> list[dict[str, Any]]:
    """`ostinato` and `maveriq` may not compress."""
    return [
        *_compared(data, size, "code", size.shares[0], LARGE, [Intent.MIN_LATENCY], ("fp16",)),
    ]


def figure_13(data: Path, size: Size) -> list[dict[str, Any]]:
    goals = [Intent.MIN_COST, Intent.MIN_MEMORY, Intent.MIN_GPU_HOURS]
    return [*_compared(data, size, "code", size.shares[0], LARGE, goals)]


def figure_14(data: Path, size: Size) -> list[dict[str, Any]]:
    names = tuple(request.name.rpartition("-")[0] for request in paper_models(Intent.MIN_LATENCY, "fp16"))
    return [
        *_compared(data, size, "conversation", size.shares[0], names[: size.models], [*Intent]),
    ]


def _compared(
    data: Path,
    size: Size,
    of_trace: str,
    share: float,
    names: Sequence[str],
    goals: Iterable[Intent],
    forms: tuple[str, ...] = tuple(FORMS),
) -> Iterable[dict[str, Any]]:
    """A row for each system, intent, seed and kind of links. Baselines know no intents."""
    whole = trace(data, of_trace)
    goals = list(goals)
    for links, seed in itertools.product(RING_STEP_S, range(size.seeds)):
        traffic = thinned(whole, share, len(names), seed)
        site = paper_site(links)
        plain = requests_of(names, traffic, Intent.MIN_LATENCY, ("fp16",))
        alone_s = serving.alone(site, plain, traffic)
        made: list[tuple[str, str, Placed]] = []
        for goal in goals:
            asked = requests_of(names, traffic, goal, forms)
            made += [
                (name, goal, systems.by_policy(site, asked, policy)) for name, policy in POLICIES.items()
            ]
        made += [(name, "-", _baseline(name, site, plain, traffic, alone_s)) for name in BASELINES]
        for system, goal_name, placed in made:
            row = serving.played(site, placed, traffic, alone_s) | {"models": len(placed)}
            where = {"links": links, "trace": of_trace, "share": share, "seed": seed}
            where |= {"system": system, "intent": goal_name}
            print(*where.values(), row["models"], row["latency_s"], row["tokens_per_s"], flush=True)
            yield where | row


def _baseline(name: str, site: Site, plain: list[Request], traffic: Traffic, alone_s: Any) -> Placed:
    if name == "accelerate-like":
        return systems.accelerate_like(site, plain)

    def kept(placed: Placed) -> float:
        return float(serving.played(site, placed, traffic, alone_s)["slo_kept"][JUDGED])

    judge: Judge = kept
    return systems.alpaserve_like(site, plain, judge, may_drop=name == "alpaserve-like")


def requests_of(
    names: Sequence[str], traffic: Traffic, goal: Intent, forms: tuple[str, ...]
) -> list[Request]:
    """Each expects its share of the trace's mean rate, and its mean lengths."""
    outputs = int(np.ceil(traffic.asked.output.mean()))
    made = []
    for number, name in enumerate(names, 1):
        request = Request(
            name=f"{name}-{number}",
            model=model(name, *forms),
            intent=goal,
            rate_per_s=traffic.rate_per_s / len(names),
            input_tokens=int(np.ceil(traffic.asked.prompt.mean())),
            output_tokens=outputs,
            concurrency=CONCURRENCY,
            context=CONTEXT,
        )
        made.append(request)
    return made
