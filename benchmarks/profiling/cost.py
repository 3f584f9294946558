"""The cost of measuring: a profile compared with every plan of the whole model. MaverIQ reports 7 to 15 times
fewer GPU seconds, 6 to 28 times less memory and 1.6 to 5 times less time."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from profiler.measurements import Footprint, Measurement, Setting, Timing


@dataclass(frozen=True)
class Cost:
    """`gpu_s`: seconds of all engines' GPUs; `wall_s`: of the engines one after the other. `peak_bytes`: the
    most that one engine needed on all of its GPUs, with the KV cache of its largest load; `gpu_bytes`: on one
    of them."""

    engines: int
    gpu_s: float
    wall_s: float
    peak_bytes: float
    gpu_bytes: float


def cost(measured: Iterable[Measurement]) -> Cost:
    """Engines whose start was not measured are left out. Raises ValueError when there is none."""
    measured = tuple(measured)
    starts = [m for m in measured if isinstance(m, Footprint)]
    if not starts:
        raise ValueError("expected the footprint of at least one engine, got none")
    runs_s = {start.setting: _measuring_s(measured, start.setting) for start in starts}
    seconds = [(start.setting.world_size, start.start_s + runs_s[start.setting]) for start in starts]
    return Cost(
        engines=len(starts),
        gpu_s=sum(ranks * taken for ranks, taken in seconds),
        wall_s=sum(taken for _, taken in seconds),
        peak_bytes=max(sum(_needed_bytes(start, measured)) for start in starts),
        gpu_bytes=max(max(_needed_bytes(start, measured)) for start in starts),
    )


def _measuring_s(measured: Sequence[Measurement], setting: Setting) -> float:
    return sum(m.taken_s for m in measured if isinstance(m, Timing) and m.setting == setting)


def _needed_bytes(start: Footprint, measured: Sequence[Measurement]) -> list[float]:
    """The memory of each rank."""
    loads = [
        m.point.batch * (m.point.input_tokens + m.output_tokens)
        for m in measured
        if isinstance(m, Timing) and m.setting == start.setting
    ]
    tokens = max(loads, default=0)
    return [start.taken(rank) + tokens * rank.kv_cache / max(1, rank.kv_tokens) for rank in start.ranks]


def compared(profile: Iterable[Measurement], whole: Iterable[Measurement]) -> dict[str, Any]:
    """Both, and how many times less the profile took."""
    here, there = cost(profile), cost(whole)
    return {
        "profile": vars(here),
        "whole": vars(there),
        "ratios": {name: round(vars(there)[name] / vars(here)[name], 2) for name in vars(here)},
    }
