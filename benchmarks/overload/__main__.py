"""Two worker groups under a multiple of the load that they can carry, on this machine's CPU.

    python -m benchmarks.overload --factor 2 --minutes 10 --out benchmarks/results/overload.json
    python -m benchmarks.overload --factor 3 --minutes 10 --kill-at 300 \
        --out benchmarks/results/overload_killed.json
    python -m benchmarks.overload --factor 3 --minutes 10 --engine echo --echo-tpot-ms 30 \
        --profile-seconds 0 --longest-ttft-s 2 --small 0.4 --out benchmarks/results/overload_3.json

A random base and LoRAs of mixed ranks, the real product on a cluster of its own. First the capacity: requests
of the same mix, without targets, from as many clients as keep all rows busy. Then Poisson arrivals at
`factor` times that, of three priorities and two tenants, whatever happens to earlier requests. `--kill-at`
kills one group's engine this number of seconds after the arrivals began. The load generator shares the
machine's cores.

Every request ends up answered, refused, dropped, failed with a type, or lost; the last must be none. Memory
is sampled every 5 s. Writes the result, and next to it a plot, and a CSV with a line for each request. The
exit status is 1 when a check fails.
"""

from __future__ import annotations

import argparse
import asyncio
import csv
import math
import os
import platform
import secrets
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import rehearsing
from benchmarks.live import groups, memory
from benchmarks.live.arrivals import LENGTHS, REHEARSED_LENGTHS, Mix, Share, endless, poisson
from benchmarks.live.streaming import Kind, Outcome, Target, closed_loop, open_loop
from benchmarks.overload import classes, plot, report
from benchmarks.overload.classes import CLASSES, FACTOR, PriorityClass, attained, shares
from benchmarks.overload.killing import Killing

RESULT = rehearsing.RESULTS / "overload.json"
CLIENTS_PER_ROW = 1.25  # so that each ended request has a successor waiting
SHORTEST_TPOT_S = 1e-3  # an engine that echoes has none


@dataclass(frozen=True)
class Given:
    """The options of the command line; `keys` are API keys by tenant, `tenants` the share of each in all
    requests."""

    factor: float
    seconds: float
    capacity_s: float
    kill_at_s: float | None
    memory_every_s: float
    seed: int
    keys: Mapping[str, str]
    tenants: Mapping[str, float]
    classes: Sequence[PriorityClass]


@dataclass(frozen=True)
class Capacity:
    per_s: float
    tokens_per_s: float
    tpot_s: float


def capacity(running: groups.Running, mix: Mix, given: Given) -> Capacity:
    """Answers a second when all rows are busy. The first quarter is for warming up."""
    clients = round(CLIENTS_PER_ROW * running.served.groups * running.served.rows)
    target = Target(running.cluster.url, running.vocabulary, seed=given.seed + 1)
    outcomes, took_s = asyncio.run(
        closed_loop(target, endless(mix, given.seed), clients, 1.25 * given.capacity_s)
    )
    after_s = 0.2 * took_s
    counted = [
        o for o in outcomes if o.kind == Kind.ANSWERED and after_s < o.end_s <= 1.25 * given.capacity_s
    ]
    if not counted:
        raise RuntimeError(f"expected answers, got {[report.described(o) for o in outcomes][:5]}")
    seconds = 1.25 * given.capacity_s - after_s
    tpot = [o.tpot_s for o in counted if o.tpot_s is not None]
    return Capacity(
        len(counted) / seconds,
        sum(o.tokens for o in counted) / seconds,
        max(SHORTEST_TPOT_S, statistics.median(tpot) if tpot else 0.0),
    )


def measure(running: groups.Running, given: Given) -> dict[str, Any]:
    lengths = REHEARSED_LENGTHS if rehearsing.is_rehearsal() else LENGTHS
    found = capacity(running, Mix(running.models, lengths, _without_targets(given.keys)), given)
    print(f"capacity: {found}", flush=True)
    tpot_s = FACTOR * found.tpot_s
    mix = Mix(running.models, lengths, shares(given.classes, tpot_s, given.keys, given.tenants))
    asks = poisson(mix, given.factor * found.per_s, given.seconds, given.seed)
    target = Target(running.cluster.url, running.vocabulary, seed=given.seed)
    began = time.monotonic()
    with (
        memory.Sampler(running.processes, given.memory_every_s) as sampler,
        Killing(running, given.kill_at_s) as killing,
    ):
        outcomes = asyncio.run(open_loop(target, asks))
    seen = memory.memory_rows(sampler.series)
    return {
        "capacity_per_s": round(found.per_s, 3),
        "capacity_tokens_per_s": round(found.tokens_per_s, 1),
        "tpot_at_capacity_s": round(found.tpot_s, 5),
        "tpot_target_s": round(tpot_s, 5),
        "factor": given.factor,
        "seconds": given.seconds,
        "lasted_s": round(time.monotonic() - began, 1),
        "killed": killing.told,
        "against_capacity": report.against_capacity(outcomes, found.tokens_per_s, given.seconds),
        "checks": {
            **report.checks(len(asks), outcomes, seen),
            "one engine was killed": [] if given.kill_at_s is None or killing.told else ["it was not"],
        },
        "classes": report.by_class(outcomes, given.classes, tpot_s),
        "tenants": report.by_tenant(outcomes),
        "over_time": plot.over_time(
            [(o.ask.at_s, o.ask.group, _ended(o, given.classes, tpot_s)) for o in outcomes], given.seconds
        ),
        "memory": seen,
        "requests": [_row(o) for o in outcomes],
    }


def _without_targets(keys: Mapping[str, str]) -> tuple[Share, ...]:
    return tuple(
        Share(1.0, tenant=tenant, headers=(("authorization", f"Bearer {key}"),))
        for tenant, key in keys.items()
    )


def _ended(outcome: Outcome, priorities: Sequence[PriorityClass], tpot_s: float) -> str:
    if outcome.kind != Kind.ANSWERED:
        return outcome.kind.value
    one = next(c for c in priorities if c.name == outcome.ask.group)
    return "answered in time" if attained(outcome, one, tpot_s)[0] else "answered late"


def _row(outcome: Outcome) -> list[Any]:
    """The row of one request, as COLUMNS says."""

    def ms(value_s: float | None) -> float | None:
        return None if value_s is None else round(1e3 * value_s, 1)

    ask = outcome.ask
    sizes = [ask.group, ask.tenant, ask.model, ask.prompt_tokens, ask.output_tokens]
    times = [ms(outcome.ttft_s), ms(outcome.tpot_s), ms(outcome.end_s - ask.at_s)]
    return [
        round(ask.at_s, 3),
        *sizes,
        outcome.kind.value,
        *times,
        report.described(outcome) if outcome.code else "",
        outcome.retry_after_s,
    ]


COLUMNS = (
    *("at_s", "class", "tenant", "model", "prompt_tokens", "output_tokens"),
    *("outcome", "ttft_ms", "tpot_ms", "total_ms", "error", "retry_after_s"),
)


TABLE = (
    *("class", "requests", *(kind.value for kind in Kind), "ttft_attained", "ttft_attained_of_admitted"),
    *("both_attained_of_admitted", "longest_wait_s"),
)


def table(result: dict[str, Any]) -> str:
    lines = [f"| {' | '.join(name.replace('_', ' ') for name in TABLE)} |", "|" + "---|" * len(TABLE)]
    lines += [f"| {' | '.join(str(row[name]) for name in TABLE)} |" for row in result["classes"]]
    for what, broken in result["checks"].items():
        lines.append(f"{what}: {'; '.join(broken) or 'holds'}")
    return "\n".join(lines)


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--factor", type=float, default=2.0)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--capacity-seconds", type=float, default=60.0)
    parser.add_argument("--kill-at", type=float, metavar="SECONDS")
    parser.add_argument("--memory-every", type=float, default=5.0, metavar="SECONDS")
    parser.add_argument(
        "--longest-ttft-s", type=float, default=math.inf, help="no request has a longer target"
    )
    parser.add_argument(
        "--small", type=float, metavar="SHARE", help="of the capacity that the small tenant asks for"
    )
    parser.add_argument("--engine", choices=("vllm", "echo"), default="vllm")
    parser.add_argument("--echo-tpot-ms", type=float, default=0.0, help="a token of engines that echo")
    parser.add_argument("--ranks", default="8,8,16,16,32,64", help="of the LoRAs")
    parser.add_argument("--rows", type=int, default=8, help="requests that an engine runs at once")
    parser.add_argument("--profile-seconds", type=float, default=300.0, help="0: measure no profile")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=RESULT)
    return parser.parse_args(argv)


def _tenants(folder: Path, keys: Mapping[str, str]) -> dict[str, Any]:
    """Settings of the product."""
    file = folder / "tenants.json"
    file.write_text(classes.tenants_file(keys))
    return {"tenants": str(file), "api_key": secrets.token_hex(16)}


def main(argv: Sequence[str] | None = None) -> int:
    args = _arguments(argv)
    ranks = tuple(int(rank) for rank in args.ranks.split(","))
    served = groups.Served(
        args.engine,
        ranks=ranks,
        rows=args.rows,
        slots=len(ranks),
        profile_s=args.profile_seconds,
        echo_tpot_s=args.echo_tpot_ms / 1e3,
    )
    keys = classes.keys()
    given = Given(
        args.factor,
        60 * args.minutes,
        args.capacity_seconds,
        args.kill_at,
        args.memory_every,
        args.seed,
        keys,
        classes.parts(args.small, args.factor),
        classes.within(CLASSES, args.longest_ttft_s),
    )
    with tempfile.TemporaryDirectory(prefix="ostinato-overload-") as name:
        folder = Path(name)
        # A rehearsal's bursts must be answered, however busy the machine is.
        settings = _tenants(folder, keys)
        if rehearsing.is_rehearsal():
            settings["sheds_load"] = False
        with groups.serving(folder, served, **settings) as running:
            found = measure(running, given)
    requests = found.pop("requests")
    result = {
        "command": rehearsing.command("benchmarks.overload", argv),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}",
        "served": {**vars(served), "ranks": list(ranks)},
        **found,
    }
    rehearsing.write_result(args.out, result)
    with args.out.with_suffix(".csv").open("w", newline="") as file:
        csv.writer(file).writerows([COLUMNS, *requests])
    plot.draw(result, args.out.with_suffix(".png"))
    print(table(result))
    return int(any(result["checks"].values()))


def rehearse(folder: Path) -> None:
    """Engines that echo: a second of capacity, a few of load, one group killed."""
    out = folder / "overload.json"
    options = (
        "--engine echo --profile-seconds 0 --capacity-seconds 1 --minutes 0.1 --ranks 4,8 --memory-every 1"
    )
    main([*options.split(), "--factor", "0.2", "--kill-at", "2", "--out", str(out)])
    result = rehearsing.check(out, "classes", "tenants", "memory", "killed")
    lines = out.with_suffix(".csv").read_text().splitlines()
    assert sum(row["requests"] for row in result["classes"]) == len(lines) - 1
    assert not result["checks"]["every request ended once"]
    assert not result["checks"]["every error has a type"]
    assert sum(row["answered"] for row in result["classes"]) > 0
    assert out.with_suffix(".png").stat().st_size > 0


if __name__ == "__main__":
    rehearsing.run(main, rehearse)
