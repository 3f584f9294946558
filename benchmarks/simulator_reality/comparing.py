"""Simulated against measured: medians and p95 of TTFT and TPOT."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from benchmarks.simulator_reality.calibrating import step_times
from benchmarks.simulator_reality.measuring import Measured
from benchmarks.simulator_reality.simulated import simulate
from benchmarks.simulator_reality.types import Facts, Timed
from profiler.compiled import Records
from profiler.step_time.records import KIND_NUMBERS

GOAL = 0.15
QUANTILES = {"p50": 50, "p95": 95}
PARTS = ("row_s", "variant_s", "token_s", "wide_variant_s", "wide_token_s")
MOST_LENGTHS = 8  # that are told apart


def fitted(measured: Measured) -> dict[str, tuple[Records, Records]]:
    """Step times by where they are from."""
    return {source: step_times(measured.facts, seen) for source, seen in measured.seen.items()}


def fitted_figures(facts: Facts, model: Records, variants: Records) -> dict[str, Any]:
    """The fitted parameters, in readable numbers."""
    own = {
        variant.name: {name.replace("_s", "_us"): round(1e6 * row[name], 3) for name in PARTS}
        for variant, row in zip(facts.variants, variants[1:], strict=True)
    }
    kinds = {variant.kind: KIND_NUMBERS[variant.kind] for variant in facts.variants}
    return {
        "path_ms": round(1e3 * model[0].path_s, 3),
        "cached_token_us": round(1e6 * model[0].context_s, 4),
        "launch_ms": {kind: round(1e3 * model[0].launch_s[n], 3) for kind, n in kinds.items()},
        "wide_launch_ms": {kind: round(1e3 * model[0].wide_launch_s[n], 3) for kind, n in kinds.items()},
        "variants": own,
    }


def compare(measured: Measured, steps: Mapping[str, tuple[Records, Records]]) -> list[dict[str, Any]]:
    """A row for each source of step times, what is asked, and figure. `error`: simulated / measured - 1."""
    rows = []
    for source, (model, variants) in steps.items():
        simulated = simulate(measured.facts, model, variants, measured.asked)
        for whom, chosen in _parts(measured).items():
            pair = ([measured.timed[i] for i in chosen], [simulated[i] for i in chosen])
            rows += [
                {"steps": source, "asked": whom, "requests": len(chosen), **row} for row in figures(*pair)
            ]
    return rows


def _parts(measured: Measured) -> dict[str, list[int]]:
    """Requests of all, of the base, of each kind of variants, and of each length of prompts."""
    kinds = ["base", *(variant.kind for variant in measured.facts.variants)]
    found = {"all": list(range(len(measured.asked)))}
    for i, asked in enumerate(measured.asked):
        found.setdefault(kinds[asked.model], []).append(i)
    lengths = sorted({asked.prompt for asked in measured.asked})
    for length in lengths if len(lengths) <= MOST_LENGTHS else []:
        found[f"{length} tokens"] = [i for i, asked in enumerate(measured.asked) if asked.prompt == length]
    return found


def figures(real: Sequence[Timed], simulated: Sequence[Timed]) -> list[dict[str, Any]]:
    rows = []
    for what in ("ttft_s", "tpot_s"):
        for name, quantile in QUANTILES.items():
            seen, made = (
                float(np.percentile([getattr(t, what) for t in x], quantile)) for x in (real, simulated)
            )
            error = made / seen - 1 if seen > 0 else float("nan")
            row = {"measured_ms": round(1e3 * seen, 3), "simulated_ms": round(1e3 * made, 3)}
            label = f"{what.removesuffix('_s').upper()} {name}"
            rows.append({"what": label, **row, "error": round(error, 4), "within": abs(error) <= GOAL})
    return rows


def table(rows: Sequence[dict[str, Any]]) -> str:
    columns = ("steps", "asked", "requests", "what", "measured_ms", "simulated_ms", "error", "within")
    lines = [f"| {' | '.join(columns)} |", "|" + "---|" * len(columns)]
    return "\n".join([*lines, *(f"| {' | '.join(str(row[c]) for c in columns)} |" for row in rows)])
