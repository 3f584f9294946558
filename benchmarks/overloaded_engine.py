"""One engine with more requests for compressed fine-tunes than it can take, simulated: what each policy of
admission makes of it, by how many variants it may run at once.

Policies: ours, DeltaZip's (section 5.4: children of a request that has ended are preempted, and no patience
ends), and none (a request that skipped the line stays). Then ours behind the product's gateway, which refuses
requests that would wait for too long, and sends an engine at most `factor` times its rows. Step times are
those of a 7B shape with 4-bit deltas on an H200 (`delta_steps.json`): 4.6 ms, 0.78 for each delta, and the
time of rows and their cached tokens.

    python -m benchmarks.overloaded_engine
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks import rehearsing
from controlplane.simulation.reading import form_of
from controlplane.simulation.simulate import simulate

RESULT = rehearsing.RESULTS / "overloaded_engine.json"
VARIANTS = 32
NEVER = 1 << 30
POLICIES: dict[str, dict[str, Any]] = {
    "ours": {"longestWaitS": 30},
    "deltazip": {"longestWaitS": 1e9, "almostDoneTokens": 0},
    "nobody steps back": {"longestWaitS": 1e9, "almostDoneTokens": NEVER},
}
ROWS = 128
ALONE: dict[str, Any] = {"refuse": False, "maxOngoing": 1000, "places": 10_000}  # the engine decides
POPULARITY = {"uniform": {"kind": "uniform"}, "zipf 1.5": {"kind": "zipf", "exponent": 1.5}}


@dataclass(frozen=True)
class Case:
    """`factor`: requests that the gateway sends an engine, over its rows; None: there is no gateway."""

    popularity: str
    limit: int
    policy: str
    factor: float | None = None

    @property
    def gateway(self) -> dict[str, Any]:
        return ALONE if self.factor is None else {"maxOngoing": round(ROWS * self.factor)}


def cases(args: argparse.Namespace) -> Iterator[Case]:
    for popularity in POPULARITY:
        for limit in args.limits:
            yield from (Case(popularity, limit, policy) for policy in POLICIES)
            yield from (Case(popularity, limit, "ours", factor) for factor in args.factors)


def scenario(args: argparse.Namespace, case: Case) -> dict[str, Any]:
    return {
        "name": f"{case.popularity}, {case.policy}, {case.limit} at once",
        "seeds": args.seeds,
        "horizonS": args.seconds,
        "policies": ["most-idle"],
        "cluster": {
            "groups": [
                {
                    "count": 1,
                    "kvTokens": 80_000,
                    "maxRows": ROWS,
                    "batchedTokens": 2048,
                    "slots": max(args.limits),
                    "loadGbPerS": 50,
                    "steps": {"baseMs": 4.6, "rowMs": 0.03, "kvTokenUs": 0.134, "promptTokenMs": 0.03},
                }
            ]
        },
        "engine": {"variantLimit": case.limit, "hostGib": 200, **POLICIES[case.policy]},
        "gateway": case.gateway,
        "variants": [{"kind": "sparse_delta", "count": VARIANTS, "mib": 2900, "variantMs": 0.78}],
        "popularity": POPULARITY[case.popularity],
        "traffic": {
            "rates": args.rates,
            "promptTokens": {"kind": "lognormal", "mean": 300, "cv": 1},
            "outputTokens": {"kind": "lognormal", "mean": 200, "cv": 1},
        },
        "classes": [{"ttftMs": 5000, "tpotMs": 100}],
    }


def row(result: dict[str, Any]) -> dict[str, Any]:
    def mean(*names: str, digits: int = 2) -> float:
        found: Any = result
        for name in names:
            found = found[name]
        return round(float(found["mean"]), digits)

    return {
        "rate_per_s": result["ratePerS"],
        "refused": round(mean("refused", "wouldBeLate") / mean("requests"), 3),
        "tokens_per_s": mean("tokensPerS", digits=0),
        "attainment": mean("attainment", "all", digits=3),
        "ttft_p50_s": mean("ttftS", "p50"),
        "ttft_p99_s": mean("ttftS", "p99"),
        "tpot_p90_ms": round(1e3 * mean("tpotS", "p90", digits=5), 1),
        "preemptions": mean("preemptions", digits=0),
    }


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = rehearsing.parser(__doc__)
    parser.add_argument("--limits", type=int, nargs="+", default=[4, 8, 16, 28])
    parser.add_argument("--factors", type=float, nargs="+", default=[0.75, 1.0, 1.25, 2.0])
    parser.add_argument("--rates", type=float, nargs="+", default=[4, 8, 12, 16, 24])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--out", type=Path, default=RESULT)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    args = _arguments(argv)
    rows = []
    for case in cases(args):
        document = simulate(form_of(scenario(args, case)), Path())
        rows += [{**asdict(case), **row(result)} for result in document["results"]]
        print(rows[-1], flush=True)
    command = rehearsing.command("benchmarks.overloaded_engine", argv)
    rehearsing.write_result(args.out, {"command": command, "seeds": args.seeds, "rows": rows})
    return 0


def rehearse(folder: Path) -> None:
    out = folder / "overloaded_engine.json"
    once = ["--limits", "2", "--factors", "1", "--rates", "20", "--seeds", "1", "--seconds", "5"]
    main([*once, "--out", str(out)])
    rows = rehearsing.check(out, "rows")["rows"]
    assert len(rows) == (len(POLICIES) + 1) * len(POPULARITY)
    assert all(found["tokens_per_s"] > 0 for found in rows)


if __name__ == "__main__":
    rehearsing.run(main, rehearse)
