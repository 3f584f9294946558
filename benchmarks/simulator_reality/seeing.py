"""The figures of loads of known composition."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from benchmarks.simulator_reality.loads import FIRST, Load, burst, loads
from benchmarks.simulator_reality.types import Asked, Facts, Play, Timed

STEPS_BETWEEN = 6  # that fill nothing, between two prompts among rows
PHASE = 0.618034  # of a step: prompts come at all moments of it


@dataclass(frozen=True)
class Seen:
    """Seconds. TTFT is the mean over the requests of a load; TPOT is that of the requests that began last,
    after all others of the burst had been filled. With prompts among rows, TTFT is that of the prompts, TPOT
    that of the rows, and `step_s` the time of a step that fills such a prompt."""

    load: Load
    ttft_s: float
    tpot_s: float
    step_s: float = 0.0


async def seen_of(play: Play, facts: Facts, repeats: int) -> list[Seen]:
    """The loads, `repeats` times in turn and once before that; medians. Without repeats that one counts."""
    found: dict[Load, list[Seen]] = {load: [] for load in loads(facts)}
    for _ in range(repeats + 1):
        for load, before in found.items():
            latest = {other: seen[-1] for other, seen in found.items() if seen}
            before.append(await see(play, facts, load, latest))
    return [_median(seen[1:] or seen) for seen in found.values()]


async def see(play: Play, facts: Facts, load: Load, latest: Mapping[Load, Seen]) -> Seen:
    if load.beside is None:
        return burst_figures(load, await play(burst(load, facts.groups)), facts.groups)
    model, length = load.beside
    alone = latest[Load(load.rows, load.prompt, load.output, load.models)]
    one = latest[Load(1, length, FIRST, (model,))]
    asked = [*burst(load, facts.groups), *prompts_among_rows(load, facts.groups, alone, one)]
    return figures_with_prompts(load, asked, await play(asked), alone, facts.groups)


def prompts_among_rows(load: Load, groups: int, alone: Seen, one: Seen) -> list[Asked]:
    """Prompts that come while the rows decode, so far apart that each has a step of its own. `alone` are the
    rows without them, `one` is such a prompt by itself."""
    assert load.beside is not None
    model, length = load.beside
    apart_s = one.ttft_s + STEPS_BETWEEN * alone.tpot_s
    count = max(1, int((load.output - 1) * alone.tpot_s / apart_s) - 1)
    first_s = 2 * alone.ttft_s + apart_s / 2
    return [
        Asked(first_s + i * apart_s + i * PHASE % 1.0 * alone.tpot_s, model, length, 1)
        for i in range(count)
        for _ in range(groups)
    ]


def burst_figures(load: Load, times: Sequence[Timed], groups: int) -> Seen:
    """The figures of one burst."""
    return Seen(load, statistics.mean(one.ttft_s for one in times), _tpot_s(times, groups))


def figures_with_prompts(
    load: Load, asked: Sequence[Asked], times: Sequence[Timed], alone: Seen, groups: int
) -> Seen:
    """Rows take as much longer as the steps that fill prompts take longer than those that do not."""
    rows, prompts = times[: load.rows * groups], times[load.rows * groups :]
    until_s = min(one.total_s for one in rows)
    came = [ask.at_s + one.ttft_s for ask, one in zip(asked[len(rows) :], prompts, strict=True)]
    each = max(1, sum(at_s <= until_s for at_s in came) / groups)
    tpot_s = _tpot_s(rows, groups)
    longer_s = (tpot_s - alone.tpot_s) * (load.output - 1) / each
    return Seen(load, statistics.mean(one.ttft_s for one in prompts), tpot_s, alone.tpot_s + longer_s)


def _tpot_s(times: Sequence[Timed], groups: int) -> float:
    """The time per token of the requests that began last."""
    return statistics.mean(one.tpot_s for one in sorted(times, key=lambda one: one.ttft_s)[-groups:])


def _median(seen: Sequence[Seen]) -> Seen:
    def middle(what: str) -> float:
        return float(statistics.median(getattr(one, what) for one in seen))

    return Seen(seen[0].load, middle("ttft_s"), middle("tpot_s"), middle("step_s"))
