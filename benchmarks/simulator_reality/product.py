"""The real system as it is measured: worker groups of a local cluster, over HTTP."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence

from benchmarks import rehearsing
from benchmarks.live.groups import BASE, Running
from benchmarks.live.streaming import Ask, Outcome, Target, open_loop
from benchmarks.simulator_reality.loads import FIRST, Load, loads
from benchmarks.simulator_reality.measuring import Measured, Workload, measure
from benchmarks.simulator_reality.seeing import Seen
from benchmarks.simulator_reality.types import Asked, Facts, Play, Timed, VariantFacts
from controlplane.management.schemas.estimates import EstimateRequest
from controlplane.profiling.usual_engine import BATCHED_TOKENS
from controlplane.traffic.base_router import RoutingRules


async def measured(running: Running, work: Workload, repeats: int) -> Measured:
    """Its loads and requests; and what its own estimates say of the same loads, if it has a profile."""
    facts = facts_of(running)
    found = await measure(player(running), facts, work, repeats)
    estimated = estimates(running, facts) if running.served.profile_s > 0 else []
    return dataclasses.replace(found, seen={**found.seen, **({"profile": estimated} if estimated else {})})


def facts_of(running: Running) -> Facts:
    client, served = running.client, running.served
    plan = client.deployment(BASE).plan
    path = client.estimate(BASE, EstimateRequest(batch=1)).pathMs
    variants = tuple(
        VariantFacts(v.model, v.kind or "", v.rank or 0, v.weightBytes or 0)
        for v in map(client.model, running.models[1:])
    )
    return Facts(
        groups=served.groups,
        rows=served.rows,
        slots=served.slots,
        kv_tokens=plan.kvCacheTokens if plan else served.rows * served.max_model_len,
        batched_tokens=BATCHED_TOKENS,
        max_model_len=served.max_model_len,
        max_ongoing=math.ceil(RoutingRules().in_flight_factor * served.rows),
        policy="least-harm",
        path_s=path.value / 1e3 if path else 0.0,
        variants=variants,
    )


def player(running: Running) -> Play:
    headers = running.headers
    seeds = itertools.count(1000)  # no two bursts have prompts in common

    async def play(asked: Sequence[Asked]) -> list[Timed]:
        target = Target(running.cluster.url, running.vocabulary, seed=next(seeds))
        asks = [Ask(a.at_s, running.models[a.model], a.prompt, a.output, headers=headers) for a in asked]
        return [_timed(outcome) for outcome in await open_loop(target, asks)]

    return play


def _timed(outcome: Outcome) -> Timed:
    ask = outcome.ask
    asked, got = (ask.prompt_tokens, ask.output_tokens), (outcome.prompt_tokens, outcome.tokens)
    whole = rehearsing.is_rehearsal() or _alike(asked, got)  # what echoes has other lengths
    if outcome.code or outcome.ttft_s is None or not whole:
        error = f"{outcome.status} {outcome.code} {outcome.message}".strip()
        raise RuntimeError(f"expected {asked} tokens of prompt and answer of {ask.model}, got {got}: {error}")
    return Timed(outcome.ttft_s, outcome.tpot_s or 0.0, outcome.end_s - ask.at_s)


def _alike(asked: tuple[int, int], got: tuple[int, int]) -> bool:
    """A tokenizer may begin a prompt with a token of its own."""
    return asked[1] == got[1] and 0 <= got[0] - asked[0] <= 1


def estimates(running: Running, facts: Facts) -> list[Seen]:
    """The loads that are measured, except prompts with rows."""
    return [_estimate(running, facts, load) for load in loads(facts) if load.beside is None]


def _estimate(running: Running, facts: Facts, load: Load) -> Seen:
    """The estimate for one engine alone. TTFT is with the path, as clients see it."""
    found = running.client.estimate(
        BASE,
        EstimateRequest(
            batch=load.rows,
            inputTokens=load.prompt,
            outputTokens=max(FIRST, load.output),
            variants=[] if load.models == (0,) else [running.models[model] for model in load.models],
        ),
    )
    engine_ms = (found.engineTtftMs or found.ttftMs).value
    return Seen(load, engine_ms / 1e3 + facts.path_s, found.tpotMs.value / 1e3)
