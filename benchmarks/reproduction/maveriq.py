"""MaverIQ's figures 10 to 14: several LLMs on one server of eight A6000s, Azure's traces, several systems.

- 10: minimal latency for four models, both traces, four rates.
- 11: the same for eight smaller models, code trace, highest rate. 12: as 10, without compression.
- 13: the intents of least cost, memory and GPU hours. 14: 21 models, which of them find a place.

The text names the models of 10 (70B, 7B and two 40B, by what is deployed) and 11; those of 12 and 13 are
taken for the same as 10's, and the 21 of 14 are ours (`benchmarks.placement_instances`).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
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
BASELINES: dict[str, Callable[[Site, Sequence[Request], Judge], Placed]] = {
    "accelerate-like": lambda site, requests, _: systems.accelerate_like(site, requests),
    "alpaserve-like": systems.with_fewer,
    "alpaserve-like-all": systems.alpaserve_like,
}
JUDGED = str(serving.SLO_FACTORS[1])
CONCURRENCY, CONTEXT = 8, 1024  # rows, and tokens of KV cache for each of them


@dataclass(frozen=True)
class Comparison:
    """Baselines know no intents, and do not compress."""

    trace: str
    names: Sequence[str]
    goals: Sequence[Intent] = (Intent.MIN_LATENCY,)
    forms: tuple[str, ...] = tuple(FORMS)
    baselines: Sequence[str] = tuple(BASELINES)


def figure_10(data: Path, size: Size) -> list[dict[str, Any]]:
    compared = [Comparison(name, LARGE) for name in ("code", "conversation")]
    return [row for one in compared for share in size.shares for row in _rows(data, size, share, one)]


def figure_11(data: Path, size: Size) -> list[dict[str, Any]]:
    return [*_rows(data, size, size.shares[0], Comparison("code", SMALL))]


def figure_12(data: Path, size: Size) -> list[dict[str, Any]]:
    return [*_rows(data, size, size.shares[0], Comparison("code", LARGE, forms=("fp16",)))]


def figure_13(data: Path, size: Size) -> list[dict[str, Any]]:
    goals = (Intent.MIN_COST, Intent.MIN_MEMORY, Intent.MIN_GPU_HOURS)
    return [*_rows(data, size, size.shares[0], Comparison("code", LARGE, goals))]


def figure_14(data: Path, size: Size) -> list[dict[str, Any]]:
    """AlpaServe may not leave out more than what has no room: that is what is counted here."""
    names = [request.name.rpartition("-")[0] for request in paper_models(Intent.MIN_LATENCY, "fp16")]
    baselines = ("accelerate-like", "alpaserve-like-all")
    one = Comparison("conversation", names[: size.models], tuple(Intent), baselines=baselines)
    return [*_rows(data, size, size.shares[0], one)]


def _rows(data: Path, size: Size, share: float, of: Comparison) -> Iterator[dict[str, Any]]:
    """One for each kind of links, seed, system and intent."""
    whole = trace(data, of.trace)
    for links, seed in itertools.product(RING_STEP_S, range(size.seeds)):
        site, traffic = paper_site(links), thinned(whole, share, len(of.names), seed)
        plain = requests_of(of.names, traffic, Intent.MIN_LATENCY, ("fp16",))
        alone_s = serving.alone(site, plain, traffic)
        for system, goal, placed in _deployments(site, traffic, plain, alone_s, of):
            row = serving.played(site, placed, traffic, alone_s) | {"models": len(placed)}
            where = {"links": links, "trace": of.trace, "share": share, "seed": seed}
            where |= {"system": system, "intent": goal}
            print(*where.values(), row["models"], row["latency_s"], row["tokens_per_s"], flush=True)
            yield where | row


def _deployments(
    site: Site, traffic: Traffic, plain: list[Request], alone_s: Any, of: Comparison
) -> Iterator[tuple[str, str, Placed]]:
    for goal, (name, policy) in itertools.product(of.goals, POLICIES.items()):
        yield name, goal, systems.by_policy(site, requests_of(of.names, traffic, goal, of.forms), policy)
    judge = _judge(site, traffic, alone_s)
    for name in of.baselines:
        yield name, "-", BASELINES[name](site, plain, judge)


def _judge(site: Site, traffic: Traffic, alone_s: Any) -> Judge:
    """Each deployment is simulated once."""
    known: dict[tuple[Any, ...], float] = {}

    def kept(placed: Placed) -> float:
        key = tuple((number, one.layout.groups, one.layout.shape) for number, one in placed)
        if key not in known:
            known[key] = float(serving.played(site, placed, traffic, alone_s)["slo_kept"][JUDGED])
        return known[key]

    return kept


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
