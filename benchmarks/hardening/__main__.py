"""A real local cluster, attacked in several ways; its engines are echo engines unless `--engine` names
others. Parts:

- `slow`: heads without end, slow heads and slow bodies, at the API and at a door;
- `greedy`: the most that one request may ask for, next to two clients that ask for little;
- `refused`: requests that are refused after much work, over one and four connections, next to these clients;
- `kills`: processes killed at random under load, while names are registered again;
- `soak`: an hour at 1.5 times the capacity, while variants come and go;
- `away`: the store (Redis) is killed for minutes, and stopped for as long.

    python -m benchmarks.hardening slow kills --out benchmarks/results/hardening.json
    python -m benchmarks.hardening greedy --engine vllm --groups 1 --out benchmarks/results/hardening.json
    python -m benchmarks.hardening refused --engine vllm --groups 1 --seconds 30 \\
        --out benchmarks/results/hardening_refused.json
    python -m benchmarks.hardening kills --store redis --victims agent controller engine gateway gcs proxy \\
        raylet redis --kills 100 --between 12 --out benchmarks/results/hardening_everything.json
    python -m benchmarks.hardening kills --store hosts --victims agent controller engine gateway proxy \\
        redis node head cut --kills 100 --between 3 --kill-minutes 20 \\
        --out benchmarks/results/hardening_hosts.json
    python -m benchmarks.hardening kills --store hosts --victims agent controller engine gateway proxy \\
        redis node head --clients 8 --rest 1 --kills 200 --between 2 --kill-minutes 29 \\
        --out benchmarks/results/hardening_answers.json
    python -m benchmarks.hardening kills --store hosts --victims cut stop:agent stop:controller stop:engine \\
        stop:gateway stop:proxy stop:redis --kills 40 --between 3 \\
        --out benchmarks/results/hardening_stopped.json
    python -m benchmarks.hardening away --store redis --minutes 10 --out benchmarks/results/hardening.json
    python -m benchmarks.hardening soak --minutes 60 --echo-tpot-ms 30 --out benchmarks/results/hardening.json

The load generator shares the machine's cores. Writes the result; parts that were measured before and are not
now stay in it.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, cast

from benchmarks import rehearsing
from benchmarks.hardening import (
    greedy_requests,
    kills,
    refused_requests,
    slow_clients,
    soak,
    store_away,
)
from benchmarks.live import groups
from benchmarks.live.three_hosts import ThreeHosts
from testkit.redis_server import RedisServer

RESULT = rehearsing.RESULTS / "hardening.json"
NAMES = ("slow", "greedy", "refused", "kills", "soak", "away")


def parts(
    args: argparse.Namespace,
    running: groups.Running,
    store_url: str,
    redis: RedisServer | None,
    adapters: Sequence[Path],
    hosts: ThreeHosts | None = None,
) -> dict[str, Callable[[], Any]]:
    series = kills.Series(
        args.kills,
        args.between,
        args.seed,
        args.victims,
        60 * args.kill_minutes,
        args.clients,
        args.rest,
    )
    sizes = slow_clients.Sizes(args.header_bytes, args.headers, args.connections)
    return {
        "slow": lambda: slow_clients.measure(running, sizes),
        "greedy": lambda: greedy_requests.measure(running, args.seconds),
        "refused": lambda: refused_requests.measure(running, args.seconds),
        "kills": lambda: kills.measure(running, store_url, adapters, series, redis, hosts),
        "soak": lambda: soak.measure(running, store_url, adapters, args.minutes, args.seconds),
        "away": lambda: store_away.measure(running, cast("RedisServer", redis), adapters, args.minutes),
    }


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = rehearsing.parser(__doc__)
    parser.add_argument("parts", nargs="+", choices=NAMES)
    parser.add_argument("--header-bytes", type=int, default=1 << 30)
    parser.add_argument("--headers", type=int, default=10_000)
    parser.add_argument("--connections", type=int, default=2_000)
    parser.add_argument("--seconds", type=float, default=20.0, help="of each measuring")
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument(
        "--victims",
        nargs="+",
        choices=kills.EVERYTHING,
        default=kills.REPLACED_ALONE,
        metavar="ROLE",
        help=f"what is killed, or hangs for a while: {' '.join(kills.EVERYTHING)}",
    )
    parser.add_argument("--between", type=float, default=4.0, help="seconds between two kills")
    parser.add_argument("--kill-minutes", type=float, default=math.inf, help="at most")
    parser.add_argument("--clients", type=int, default=4, help="that ask while processes are killed")
    parser.add_argument("--rest", type=float, default=0.0, help="seconds between two changes of an operator")
    parser.add_argument("--minutes", type=float, default=60.0, help="of the soak, and away")
    parser.add_argument(
        "--store",
        choices=("sqlite", "redis", "hosts"),
        default="sqlite",
        help="hosts: a Redis, and three hosts for the cluster (needs root)",
    )
    parser.add_argument("--engine", choices=("echo", "vllm"), default="echo")
    parser.add_argument("--echo-tpot-ms", type=float, default=0.0, help="of the engines; 0: at once")
    parser.add_argument("--groups", type=int, default=2)
    parser.add_argument("--gateways", type=int, default=2)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=RESULT)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    args = _arguments(argv)
    served = groups.Served(
        args.engine,
        groups=args.groups,
        ranks=(8, 16),
        profile_s=0,
        echo_tpot_s=args.echo_tpot_ms / 1e3,
        apart=args.store == "hosts",
    )
    found: dict[str, Any] = {}
    if args.store == "sqlite" and ("away" in args.parts or {"redis", "stop:redis"} & {*args.victims}):
        raise SystemExit("expected --store redis for what strikes Redis, got sqlite")
    if args.store != "hosts" and not {*args.victims}.isdisjoint(kills.OF_HOSTS):
        raise SystemExit(f"expected --store hosts for what strikes hosts, got {args.store}")
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ostinato-hardening-")))
        hosts = stack.enter_context(_hosts(folder)) if args.store == "hosts" else None
        store_url, redis = (
            (str(hosts.settings["store_url"]), hosts.redis)
            if hosts is not None
            else stack.enter_context(_store(args.store, folder))
        )
        settings: dict[str, Any] = {"store_url": store_url, "gateway_replicas": args.gateways}
        if hosts is not None:
            settings |= {"site": hosts, **hosts.settings}
        with groups.serving(folder, served, **settings) as running:
            adapters = sorted((folder / "adapters").iterdir())
            measuring = parts(args, running, store_url, redis, adapters, hosts)
            for part in args.parts:
                began_s = time.monotonic()
                rows = measuring[part]()
                found[part] = {
                    "command": rehearsing.command("benchmarks.hardening", argv),
                    "machine": f"{platform.machine()}, {os.cpu_count()} cores",
                    "gateways": args.gateways,
                    "gateways_per_node": settings.get("gateways_per_node", 0),
                    "groups": args.groups,
                    "took_s": round(time.monotonic() - began_s, 1),
                    "found": rows,
                }
                print(part, json.dumps(found[part]["found"], indent=1)[:4000], flush=True)
                _keep(args.out, found)
    return 0


@contextmanager
def _hosts(folder: Path) -> Iterator[ThreeHosts]:
    made = ThreeHosts(folder)
    try:
        yield made
    finally:
        made.close()


@contextmanager
def _store(kind: str, folder: Path) -> Iterator[tuple[str, RedisServer | None]]:
    """Its URL, and its server if it has one."""
    if kind == "sqlite":
        yield f"sqlite://{folder}/home/state.db", None
        return
    (folder / "redis").mkdir()
    server = RedisServer(folder / "redis")
    try:
        yield server.url, server
    finally:
        server.stop()


def _keep(out: Path, found: dict[str, Any]) -> None:
    before = json.loads(out.read_text()) if out.exists() else {}
    before.pop("rehearsal", None)
    rehearsing.write_result(out, {**before, **found})


def rehearse(folder: Path) -> None:
    """A few of each, on one cluster. For a cluster of three hosts see `rehearse_hosts`."""
    out = folder / "hardening.json"
    sizes = "--header-bytes 1048576 --headers 200 --connections 20 --seconds 1"
    few = "--kills 2 --victims gateway redis --between 1 --clients 6"
    few += " --minutes 0.05 --groups 1 --gateways 2"
    main([*NAMES, *sizes.split(), *few.split(), "--store", "redis", "--out", str(out)])
    result = rehearsing.check(out, *NAMES)
    for row in result["slow"]["found"]:
        assert row["closed_after_s"] < slow_clients.LIMIT_S, row
    kills_found = result["kills"]["found"]
    assert not kills_found["wrong"], kills_found["wrong"]
    assert kills_found["clients"] == 6
    for operator in kills_found["operations"]:
        assert not operator["lost"] + operator["doubled"], operator
    for row in result["greedy"]["found"]["beside"]:
        assert row["asked"].keys() <= {"200"}, row
        assert row["answers"] > 0, row
        assert not row["failed"], row
    for row in result["away"]["found"]:
        assert not row["failures"], row
        assert not row["operations"]["lost"], row
        assert row["acknowledged_before"] == 2, row
        assert row["first_change_after_s"] is not None, row
    for row in result["refused"]["found"]["beside"]:
        assert row["answers"] > 0, row
        assert row["asked"], row
    assert sum(result["soak"]["found"]["requests"].values()) > 0


def rehearse_hosts(folder: Path) -> None:
    """One node killed and one gateway stopped, on three hosts in network namespaces. Needs root."""
    out = folder / "hosts.json"
    few = ("--kills", "2", "--victims", "node", "stop:gateway", "--between", "1")
    main(["kills", "--store", "hosts", *few, "--out", str(out)])
    found = rehearsing.check(out, "kills")["kills"]["found"]
    assert found["kills"] == {"node": 1, "stop:gateway": 1}, found
    assert found["gaps_s"]["stop:gateway"]["largest"] < kills.CUT_S, found
    assert found["answers"] > 0
    assert not found["wrong"], found
    for operator in found["operations"]:
        assert not operator["lost"] + operator["doubled"], operator


if __name__ == "__main__":
    rehearsing.run(main, rehearse)
