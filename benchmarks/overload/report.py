"""The overload's outcome, by class and tenant; and its checks. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from benchmarks.live.streaming import Kind, Outcome
from benchmarks.overload.classes import PriorityClass, attained

GROWTH_SHARE, GROWTH_MIB = 0.05, 16.0  # memory that grew by more than both is not flat


def by_class(
    outcomes: Sequence[Outcome], classes: Sequence[PriorityClass], tpot_s: float
) -> list[dict[str, Any]]:
    """A row for each class. Attainment is of all its requests, and of those that were admitted (not refused;
    one that was dropped later had been)."""
    rows = []
    for one in classes:
        own = [o for o in outcomes if o.ask.group == one.name]
        met = [attained(o, one, tpot_s) for o in own]
        admitted = [m for o, m in zip(own, met, strict=True) if o.kind is not Kind.REFUSED]
        rows.append(
            {
                "class": one.name,
                "ttft_target_s": one.ttft_s,
                "requests": len(own),
                **{kind.value: sum(o.kind == kind for o in own) for kind in Kind},
                "codes": dict(Counter(described(o) for o in own if o.code)),
                "ttft_attained": _share([ttft for ttft, _ in met]),
                "both_attained": _share([both for _, both in met]),
                "ttft_attained_of_admitted": _share([ttft for ttft, _ in admitted]),
                "both_attained_of_admitted": _share([both for _, both in admitted]),
                "ttft_s": spread([o.ttft_s for o in own if not o.code and o.ttft_s is not None]),
                "tpot_s": spread([o.tpot_s for o in own if not o.code and o.tpot_s is not None]),
                "total_s": spread([o.end_s - o.ask.at_s for o in own if not o.code]),
                "longest_wait_s": round(max((o.wait_s for o in own), default=0.0), 3),
                "longest_wait_of_answered_s": round(
                    max((o.wait_s for o in own if o.kind == Kind.ANSWERED), default=0.0), 3
                ),
                "longest_without_answer_s": round(longest_gap(own), 3),
                "retry_after_s": spread([o.retry_after_s for o in own if o.retry_after_s is not None]),
                "refused_after_s": spread([o.end_s - o.ask.at_s for o in own if o.kind == Kind.REFUSED]),
            }
        )
    return rows


def described(outcome: Outcome) -> str:
    """`429 overloaded: late`."""
    return f"{outcome.status} {outcome.code}" + (f": {outcome.reason}" if outcome.reason else "")


def spread(values: Sequence[float]) -> dict[str, float] | None:
    if not values:
        return None
    p50, p95, p99 = np.percentile(values, [50, 95, 99])
    return {
        name: round(float(v), 4) for name, v in zip(("p50", "p95", "p99"), (p50, p95, p99), strict=True)
    } | {"max": round(max(values), 4)}


def _share(met: Sequence[bool]) -> float | None:
    return round(sum(met) / len(met), 4) if met else None


def longest_gap(outcomes: Sequence[Outcome]) -> float:
    """The longest time in which none of these was answered, while the first to the last of them were due."""
    if not outcomes:
        return 0.0
    due = [o.ask.at_s for o in outcomes]
    answered = sorted(o.end_s for o in outcomes if o.kind == Kind.ANSWERED)
    moments = [min(due), *(at_s for at_s in answered if min(due) < at_s < max(due)), max(due)]
    return max((b - a for a, b in pairwise(moments)), default=0.0)


def by_tenant(outcomes: Sequence[Outcome]) -> list[dict[str, Any]]:
    """The requests and answers of each tenant."""
    rows = []
    for tenant in sorted({o.ask.tenant for o in outcomes}):
        own = [o for o in outcomes if o.ask.tenant == tenant]
        rows.append(
            {
                "tenant": tenant,
                "requests": len(own),
                **{kind.value: sum(o.kind == kind for o in own) for kind in Kind},
                "answered_share": _share([o.kind == Kind.ANSWERED for o in own]),
                "tokens": sum(o.tokens for o in own if o.kind == Kind.ANSWERED),
            }
        )
    return rows


def against_capacity(outcomes: Sequence[Outcome], tokens_per_s: float, seconds: float) -> dict[str, Any]:
    """The answers in the time of the load, as a share of the capacity; and the time of the others. The first
    tenth of the time fills the queues."""
    answered = [o for o in outcomes if o.kind == Kind.ANSWERED]
    tokens = sum(o.tokens for o in answered if 0.1 * seconds < o.end_s <= seconds)
    return {
        "goodput_tokens_per_s": round(tokens / (0.9 * seconds), 1),
        "goodput_of_capacity": round(tokens / (0.9 * seconds) / tokens_per_s, 4),
        "admitted_ttft_s": spread([o.ttft_s for o in answered if o.ttft_s is not None]),
        "refused_after_s": spread([o.end_s - o.ask.at_s for o in outcomes if o.kind == Kind.REFUSED]),
    }


def checks(sent: int, outcomes: Sequence[Outcome], memory: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The checks, each with the figures that break it; nothing: it holds."""
    lost = Counter(described(o) for o in outcomes if o.kind == Kind.LOST)
    short = [o for o in outcomes if o.kind == Kind.ANSWERED and o.tokens != o.ask.output_tokens]
    unlabelled = sum(o.kind == Kind.REFUSED and o.retry_after_s is None for o in outcomes)
    return {
        "every request ended once": [] if sent == len(outcomes) else [f"{sent} sent, {len(outcomes)} ended"],
        "every error has a type": [f"{count} x {what}" for what, count in lost.items()],
        "every answer is whole": [f"{len(short)} answers of another length than asked"] if short else [],
        "every refusal says when to come again": [f"{unlabelled} without Retry-After"] if unlabelled else [],
        "the memory of every process is flat": [
            f"{row['process']} ({row['pid']}): {row['pss']['first_mib']} to {row['pss']['last_mib']} MiB"
            for row in memory
            if row["pss"] and grew(row["pss"])
        ],
    }


def grew(pss: dict[str, float]) -> bool:
    return pss["share"] > GROWTH_SHARE and pss["last_mib"] - pss["first_mib"] > GROWTH_MIB
