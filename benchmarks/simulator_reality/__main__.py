"""The simulator against reality: medians and p95 of TTFT and TPOT of the same requests, goal within 15%.

    python -m benchmarks.simulator_reality.gpu --out MEASURED.json
    python -m benchmarks.simulator_reality MEASURED.json [--loads OTHER.json] --out RESULT.json

The first command measures on one GPU: loads of known composition (rows, prompts, variants), then Poisson
arrivals at a share of what the engine can do. The second needs no GPU: it fits step times to the loads, those
of another measurement with --loads, and simulates the arrivals with the simulator's own gateway and engines.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path

from benchmarks import rehearsing
from benchmarks.simulator_reality.comparing import GOAL, compare, fitted, fitted_figures, table
from benchmarks.simulator_reality.measuring import Workload, as_json, from_json, measure
from benchmarks.simulator_reality.types import Asked, Facts, Play, Timed, VariantFacts


def main(argv: Sequence[str] | None = None) -> None:
    parser = rehearsing.parser(__doc__)
    parser.add_argument("measured", type=Path)
    parser.add_argument("--loads", type=Path, help="whose loads step times are fitted to; else its own")
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args(argv)
    record = json.loads(given.measured.read_text())
    seen = from_json(record)
    loads = json.loads(given.loads.read_text()) if given.loads else record
    steps = fitted(from_json(loads))
    rows = compare(seen, steps)
    result = {
        "command": rehearsing.command("benchmarks.simulator_reality", argv),
        "measured": {name: record.get(name) for name in ("command", "machine", "rate", "facts")},
        "loads": {name: loads.get(name) for name in ("command", "machine")},
        "fitted": {source: fitted_figures(seen.facts, *both) for source, both in steps.items()},
        "goal": GOAL,
        "rows": rows,
    }
    rehearsing.write_result(given.out, result)
    print(table(rows))


def rehearse(folder: Path) -> None:
    """The "measured" figures are simulated, with other step times than the fitted ones."""
    facts = Facts(
        2,
        4,
        2,
        4096,
        512,
        256,
        64,
        "most-idle",
        0.002,
        (VariantFacts("a", "lora", 8, 1000), VariantFacts("b", "lora", 32, 4000)),
        wide_from=100,
    )
    found = asyncio.run(measure(known(facts), facts, Workload(0.5, 20.0, ((12, 8), (60, 20))), repeats=1))
    rehearsing.write_result(folder / "measured.json", as_json(found))
    measured = str(folder / "measured.json")
    main([measured, "--loads", measured, "--out", str(folder / "result.json")])
    rows = rehearsing.check(folder / "result.json", "rows")["rows"]
    assert {row["asked"] for row in rows} == {"all", "base", "lora", "12 tokens", "60 tokens"}
    assert all(row["within"] for row in rows), rows


def known(facts: Facts) -> Play:
    """A system that is the simulator itself, with steps of 10 ms and 1 ms for each row, and so on."""
    import numpy as np

    from benchmarks.simulator_reality.simulated import simulate
    from profiler.compiled import records
    from profiler.step_time.records import MAX_ROWS, PREFILL_KNOTS, STEP_MODEL, VARIANT, rank_class

    model, variants = records(STEP_MODEL, 1), records(VARIANT, 1 + len(facts.variants))
    model.decode_s = 10e-3 + 1e-3 * np.arange(MAX_ROWS + 1)
    model.prefill_grain = facts.batched_tokens / PREFILL_KNOTS
    model.prefill_s = 10e-3 + 0.2e-3 * np.arange(PREFILL_KNOTS + 1) * facts.batched_tokens / PREFILL_KNOTS
    model.context_s = 1e-6
    model.batched_tokens, model.kv_tokens = facts.batched_tokens, facts.kv_tokens
    model.max_rows, model.slots, model.path_s = facts.rows, facts.slots, facts.path_s
    model.wide_from, model.wide_launch_s = facts.wide_from, 5e-3
    variants.kind, variants.weight = -1, 1.0
    for row, one in zip(variants[1:], facts.variants, strict=True):
        row.kind, row.rank, row.rank_class = 0, one.rank, rank_class(one.rank)
        row.row_s, row.variant_s, row.token_s = 0.2e-3, 0.5e-3 + 1e-7 * one.size_bytes, 5e-6
        row.wide_variant_s, row.wide_token_s = 3e-3, 2e-6

    async def play(asked: Sequence[Asked]) -> list[Timed]:
        return simulate(facts, model, variants, asked)

    return play


if __name__ == "__main__":
    rehearsing.run(main, rehearse)
