"""The outcome of a case. Pure.

A request that was not done when its case was given up counts as if it had been done at that moment, so times
of an engine that fell behind are lower bounds; `unfinished` says how many those are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.serving.workload import parse_case

TTFT_GOALS_S = (0.5, 1.0, 5.0)
# The promise of TTFT, kept by 90% of requests, and of TPOT, by 90% of those that got two tokens.
PROMISES = {"1 s, 50 ms": (1.0, 0.05), "5 s, 100 ms": (5.0, 0.1)}
E2E_GOALS_S = (5.0, 10.0, 20.0)
COMPARED = ("requests_per_s", "tokens_per_s", "e2e_mean_s", "e2e_p90_s", "ttft_mean_s", "ttft_p90_s")
Row = Mapping[str, Any]


@dataclass
class Outcome:
    """Times of one request, in seconds since it was sent; None for what had not happened when it was given
    up, after `given_up_s`."""

    ttft_s: float | None = None
    e2e_s: float | None = None
    tokens: int = 0
    given_up_s: float = 0.0

    def tpot_s(self) -> float | None:
        """The figures of finished requests; None where none finished, or a single token was requested."""
        if self.ttft_s is None or self.tokens < 2:
            return None
        end_s = self.given_up_s if self.e2e_s is None else self.e2e_s
        return (end_s - self.ttft_s) / (self.tokens - 1)


def summary(outcomes: Sequence[Outcome], duration_s: float) -> dict[str, Any]:
    """The outcome of one case. `duration_s` is from its start to its last request's end."""
    ttft = np.array([o.given_up_s if o.ttft_s is None else o.ttft_s for o in outcomes])
    e2e = np.array([o.given_up_s if o.e2e_s is None else o.e2e_s for o in outcomes])
    tpot = np.array([seconds for o in outcomes if (seconds := o.tpot_s()) is not None])
    finished = sum(o.e2e_s is not None for o in outcomes)
    met_e2e = [o.e2e_s for o in outcomes if o.e2e_s is not None]
    met_ttft = [o.ttft_s for o in outcomes if o.ttft_s is not None]
    return {
        "requests": len(outcomes),
        "unfinished": len(outcomes) - finished,
        "duration_s": round(duration_s, 3),
        "requests_per_s": round(finished / duration_s, 4),
        "tokens_per_s": round(sum(o.tokens for o in outcomes) / duration_s, 2),
        **_spread("ttft", ttft),
        **_spread("e2e", e2e),
        **(_spread("tpot", tpot, 5) if len(tpot) else {}),
        "ttft_within": _within(met_ttft, TTFT_GOALS_S, len(outcomes)),
        "e2e_within": _within(met_e2e, E2E_GOALS_S, len(outcomes)),
    }


def _spread(name: str, values: Any, digits: int = 4) -> dict[str, float]:
    p50, p90, p99 = np.percentile(values, [50, 90, 99])
    found = {"mean": values.mean(), "p50": p50, "p90": p90, "p99": p99}
    return {f"{name}_{what}_s": round(float(value), digits) for what, value in found.items()}


def _within(values: Sequence[float], goals: Sequence[float], requests: int) -> dict[str, float]:
    """The share of all requests that met each goal."""
    return {f"{goal:g}": round(sum(v <= goal for v in values) / requests, 4) for goal in goals}


def highest_rates(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """For each engine, popularity and promise the highest rate of Poisson arrivals at which 90% of requests
    kept TTFT and 90% TPOT, with each seed, as they did at all lower rates that were measured. `rate` is None
    where the lowest one broke it; `broken_at` is the lowest rate that did, None where none did. The last row
    of a case that was measured again counts."""
    cases: dict[tuple[str, int | None, str], dict[float, dict[str, Row]]] = {}
    for row in rows:
        if "tpot_p90_s" not in row:
            continue
        case = parse_case(row["case"])
        if case.rated and case.cv == 1:
            by_rate = cases.setdefault((row["engine"], row.get("limit"), case.kind), {})
            by_rate.setdefault(case.rate, {})[case.name] = row
    found = []
    for (engine, limit, kind), by_rate in sorted(cases.items(), key=str):
        for promise, goals in PROMISES.items():
            rate, broken_at = _highest(by_rate, goals)
            what = {"engine": engine, "limit": limit, "popularity": kind, "promise": promise}
            found.append({**what, "rate": rate, "broken_at": broken_at})
    return found


def _highest(
    by_rate: Mapping[float, Mapping[str, Row]], goals: tuple[float, float]
) -> tuple[float | None, float | None]:
    highest = None
    for rate, rows in sorted(by_rate.items(), key=lambda item: item[0]):
        if any(row["ttft_p90_s"] > goals[0] or row["tpot_p90_s"] > goals[1] for row in rows.values()):
            return highest, rate
        highest = rate
    return highest, None


def ratios(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Ratios of ours to each baseline's, for each case that both have; one entry for each of our settings.
    None where the baseline has finished nothing. The last row of a case that was measured again counts."""
    measured = [row for row in rows if "case" in row and "requests" in row]
    cases = {(row["engine"], row["case"], row.get("limit")): row for row in measured}.values()
    return [
        {
            "case": row["case"],
            "limit": row.get("limit"),
            "to": other["engine"],
            **{name: round(row[name] / other[name], 4) if other[name] else None for name in COMPARED},
        }
        for row in cases
        for other in cases
        if row["engine"] == "ours" != other["engine"] and row["case"] == other["case"]
    ]
