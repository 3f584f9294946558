"""Whether any policy keeps more promises than ours, in random mixes of traffic and machines.

`python -m benchmarks.routing.mixes --out benchmarks/results/routing_mixes.json`

A mix is drawn from wide ranges by its number: how many groups of which machine, how long prompts and answers
are (a few tokens to thousands, of several distributions; lengths and bursts as in Azure's trace of a coding
service), promises, variants or none, all as in a file of `ostinato simulate`. For each the rate is searched
at which the group with the fewest requests (most-idle) keeps 95% of promises; all policies are run at shares
of that, over several draws of the same requests. Ours is to be no more than 2 points below the best one.
Numbers below CHOSEN were looked at while our policy was changed, those from there on were not.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import rehearsing
from benchmarks.routing.rates import largest_rate
from controlplane.baselines.routing.choose import POLICIES
from controlplane.simulation import reading
from controlplane.simulation.experiment import Case, Experiment

OURS = POLICIES[0]
CHOSEN = 20
KEPT = 0.95
SHARES = (0.9, 1.0)
PRECISION = 0.05
WARM = 0.2  # of the requests


class Draws:
    """Numbers of one mix."""

    def __init__(self, number: int) -> None:
        self._rng = np.random.default_rng((number, 47))

    def between(self, low: float, high: float) -> float:
        return float(self._rng.uniform(low, high))

    def scale(self, low: float, high: float) -> float:
        """Values are as likely in any part of the range, by ratio."""
        return math.exp(self.between(math.log(low), math.log(high)))

    def one_of(self, *options: Any) -> Any:
        return options[int(self._rng.integers(len(options)))]


def mix(number: int) -> dict[str, Any]:
    """A scenario of `ostinato simulate`, but for its rate and how long it lasts."""
    draws = Draws(number)
    groups = int(draws.scale(2, 13))
    base_ms = draws.scale(5, 40)
    kv_tokens, batched = int(draws.scale(20_000, 400_000)), draws.one_of(2048, 2048, 8192)
    rows = int(draws.scale(16, 256))
    token_ms = draws.scale(0.01, 0.2)
    lengths = coding(kv_tokens) if number % 4 == 0 else any_lengths(draws, kv_tokens)
    prompt_ms = (base_ms + token_ms * lengths["promptTokens"]["mean"]) / base_ms
    classes = [
        {
            "name": f"class-{n}",
            "share": draws.between(0.3, 1),
            "ttftMs": max(300.0, base_ms * prompt_ms * draws.scale(4, 40)),
            "tpotMs": base_ms * draws.scale(1.4, 8),
        }
        for n in range(draws.one_of(1, 1, 2))
    ]
    steps = {
        "baseMs": base_ms,
        "rowMs": base_ms * draws.scale(2e-3, 2e-2),
        "kvTokenUs": base_ms * draws.scale(5e-5, 5e-3),
        "promptTokenMs": token_ms,
    }
    group = {"count": groups, "maxRows": rows, "batchedTokens": batched, "kvTokens": kv_tokens}
    return {
        "name": f"mix-{number}",
        "cluster": {"groups": [group | {"steps": steps, "slots": draws.one_of(4, 8, 16)}]},
        "gateway": {"maxOngoing": rows, "places": 100_000, "refuse": False},
        "variants": variants(draws, base_ms) if number % 3 == 2 else [],
        "popularity": {"baseShare": draws.between(0, 0.5), "exponent": draws.between(0.5, 1.5)},
        "traffic": {"ratePerS": 1.0, **lengths},
        "classes": classes,
    }


def any_lengths(draws: Draws, kv_tokens: int) -> dict[str, Any]:
    longest = min(16_000, kv_tokens // 2)
    prompt = min(draws.scale(60, 6000), longest / 2)
    answer = {"mean": draws.scale(5, 500), "least": 1, "most": min(2000, kv_tokens // 4)}
    return {
        "promptTokens": {"kind": "lognormal", "mean": prompt, "cv": draws.between(0.3, 1.6), "most": longest},
        "outputTokens": {"kind": draws.one_of("geometric", "lognormal"), "cv": draws.between(0.3, 1.5)}
        | answer,
        "expectedOutput": draws.one_of("mean", "mean", "mean", "exact"),
    }


def coding(kv_tokens: int) -> dict[str, Any]:
    """Long prompts, short answers, in bursts: as in Azure's trace of a coding service (2023)."""
    longest = min(7500, kv_tokens // 2)
    return {
        "arrivals": "gamma",
        "cv": 2.0,
        "promptTokens": {"kind": "lognormal", "mean": 2048.0, "cv": 0.95, "most": longest},
        "outputTokens": {"kind": "lognormal", "mean": 28.0, "cv": 2.0, "most": 1000},
    }


def variants(draws: Draws, base_ms: float) -> list[dict[str, Any]]:
    lora = {"kind": "lora", "count": int(draws.scale(4, 200)), "ranks": [8, 16, 64], "mibPerRank": 2.0}
    delta = {"kind": "sparse_delta", "count": draws.one_of(1, 4, 16), "mib": draws.scale(200, 3000)}
    return [
        lora | {"rowUs": 1e3 * base_ms * draws.scale(1e-3, 1e-2)},
        delta | {"variantMs": base_ms * draws.scale(0.02, 0.2)},
    ]


def kept(document: dict[str, Any], policy: str, rate: float, requests: int, seed: int) -> float:
    """The share of promises kept among N requests."""
    horizon_s = requests / rate / (1 - WARM)
    lasting = {**document, "horizonS": horizon_s, "warmUpS": WARM * horizon_s}
    experiment = Experiment(reading.form_of(lasting), Path())
    share = experiment.run(Case(policy, rate, seed, experiment.counts))["attainment"]["all"]
    return 1.0 if share is None else float(share)


def measured(number: int, policies: Sequence[str], requests: int, seeds: int) -> list[dict[str, Any]]:
    """The promises that each policy keeps at each share of the rate."""
    document, rows = mix(number), []
    rate = largest_rate(lambda rate: kept(document, "most-idle", rate, requests, 0) >= KEPT, 10.0, PRECISION)
    for share in SHARES if rate else ():
        shares = {
            policy: sum(kept(document, policy, share * rate, requests, seed) for seed in range(seeds)) / seeds
            for policy in policies
        }
        best = max((policy for policy in policies if policy != OURS), key=lambda policy: shares[policy])
        below = 100 * (shares[best] - shares[OURS])
        rows.append(
            {
                "mix": number,
                "rate": round(share * rate, 3),
                "kept": {policy: round(found, 4) for policy, found in shares.items()},
                "best_other": best,
                "points_below": round(below, 2),
            }
        )
    return rows


def main(argv: Sequence[str] | None = None) -> None:
    parser = rehearsing.parser(__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--since", type=int, default=0, help="the first mix")
    parser.add_argument("--until", type=int, default=CHOSEN, help="the one after the last")
    parser.add_argument("--policies", default=",".join(POLICIES))
    parser.add_argument("--requests", type=int, default=3000)
    parser.add_argument("--seeds", type=int, default=3)
    asked = parser.parse_args(argv)
    policies, rows = asked.policies.split(","), []
    for number in range(asked.since, asked.until):
        rows += measured(number, policies, asked.requests, asked.seeds)
        most = max((row["points_below"] for row in rows), default=None)
        rehearsing.write_result(asked.out, {"most_points_below": most, "rows": rows})
        for row in rows[-len(SHARES) :]:
            print(row["mix"], row["rate"], row["best_other"], row["points_below"], flush=True)


def rehearse(folder: Path) -> None:
    few = ["--until", "1", "--requests", "40", "--seeds", "1", "--policies", f"{OURS},most-idle"]
    main(["--out", str(folder / "r.json"), *few])


if __name__ == "__main__":
    rehearsing.run(main, rehearse)
