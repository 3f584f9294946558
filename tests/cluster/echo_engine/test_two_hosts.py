"""Two hosts, whose metrics are seen from a third. A node that is killed under load: what was on it goes on
elsewhere, and comes back with the node."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from controlplane.settings import Settings
from testkit.cluster.clusters import until
from testkit.cluster.hosts import HEAD, OTHER, OUTSIDE, HostPair
from testkit.cluster.load import Load
from testkit.cluster.scraping import Prometheus
from testkit.redis_server import RedisServer, free_port

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(3000),
    pytest.mark.skipif(os.geteuid() != 0, reason="making network namespaces needs root"),
]

LEFT, RIGHT, TWINS = "left", "right", "twins"
APART = {"group": "apart"}
# A gateway's connections to a host that is gone break off, or are cut.
ERRORS = ("502 engine_failed", "503 unavailable", "event engine_failed", "event unavailable")
# The gateway itself may have been there: then HAProxy ends the connection of what it was answering.
OF_THE_GATEWAY = ("transport ", "stream ended")


@pytest.fixture(scope="module")
def pair(base_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[HostPair]:
    servers: list[RedisServer] = []

    def redis(*options: str) -> RedisServer:
        servers.append(RedisServer(tmp_path_factory.mktemp("redis"), *options))
        return servers[-1]

    made = HostPair("echo", str(base_folder.parent), redis)
    try:
        made.up()
        for name in (LEFT, RIGHT, TWINS):
            made.perform("POST", "/register_model", {"model": name, "source": str(base_folder)})
        yield made
    finally:
        made.discard()
        for server in servers:
            server.stop()


def deploy(pair: HostPair, name: str, **asked: Any) -> None:
    pair.perform("POST", "/deploy_model", {"model": name, "maxOutputLength": 32, **asked})


def places(pair: HostPair, name: str) -> dict[str, set[str]]:
    """Nodes of the groups that serve, by group."""
    groups = pair.get(f"/deployments/{name}")["groups"]
    return {
        g["name"]: {rank["node"] for rank in g["plan"]["ranks"]} for g in groups if g["phase"] == "Serving"
    }


def promised(pair: HostPair) -> set[tuple[str, str]]:
    """(deployment, node) of every reservation."""
    return {
        (r["deployment"], node["name"])
        for node in pair.get("/cluster")["nodes"]
        for device in node["devices"]
        for r in device["reservations"]
    }


def steady(load: Load, since: float) -> float | None:
    """The moment of the first answer to a request made after `since`, once 24 in a row came."""
    if load.successes_since(max(since, load.last_failure())) < 24:
        return None
    return min(o.ended for o in list(load.outcomes) if o.error is None and o.begun > since)


def strike(pair: HostPair, load: Load, what: str) -> None:
    """Kill the other host, and wait for steady answers."""
    until(lambda: load.successes_since(0) >= 16, "answers before the kill")
    killed = time.monotonic()
    pair.kill_node(OTHER)
    first = until(lambda: steady(load, killed), "24 answers in a row")
    failed_s = max(0.0, load.last_failure() - killed)
    longest_s = max(o.ended - o.begun for o in load.outcomes)
    print(
        f"\n{what}: first new answer {first - killed:.1f} s, last failure {failed_s:.1f} s after the kill; "
        f"{len(load.outcomes)} requests, errors {dict(load.errors())}, longest {longest_s:.1f} s"
    )


def test_prometheus_on_another_host_scrapes_every_process(pair: HostPair, tmp_path: Path) -> None:
    """Each at its node's address, on a port of the range that the chart opens."""
    for name in (LEFT, RIGHT):
        deploy(pair, name, antiAffinity=APART)
        reply = pair.http.post("/v1/completions", json={"model": name, "prompt": "a b"})
        assert reply.status_code == 200, reply.text
    targets = {t["targets"][0]: t["labels"]["component"] for t in pair.get("/metrics/targets")}
    assert sorted(targets.values()) == ["controller", f"engine-{LEFT}", f"engine-{RIGHT}", "gateway"]
    found = {tuple(address.split(":")) for address in targets}
    assert {ip for ip, _ in found} == {pair.addresses[HEAD], pair.addresses[OTHER]}
    assert {int(port) for _, port in found} <= set(Settings().metrics_port_range.each())
    listen = f"{pair.addresses[OUTSIDE]}:{free_port()}"
    prometheus = Prometheus(tmp_path, f"{pair.url}/metrics/targets", listen, pair.inside(OUTSIDE))
    try:
        until(lambda: scraped(prometheus) == targets, "metrics of ours from every process")
        up = {s["metric"]["instance"]: s["value"][1] for s in prometheus.query("up")}
        assert up == dict.fromkeys(targets, "1")
    finally:
        prometheus.stop()
        for name in (LEFT, RIGHT):
            pair.perform("DELETE", f"/deployments/{name}")


def scraped(prometheus: Prometheus) -> dict[str, str]:
    """The component of each instance that gave a metric of ours."""
    series = prometheus.query('count by (instance, component) ({__name__=~"ostinato_.+"})')
    return {s["metric"]["instance"]: s["metric"]["component"] for s in series}


def test_groups_of_a_killed_node_serve_on_the_other_node(pair: HostPair) -> None:
    for name in (LEFT, RIGHT):
        deploy(pair, name, antiAffinity=APART)
    (victim,) = (name for name in (LEFT, RIGHT) if places(pair, name) == {name: {OTHER}})
    (filler,) = {LEFT, RIGHT} - {victim}
    pair.perform("DELETE", f"/deployments/{filler}")  # it would keep the victim off its node
    before = pair.records()
    with Load(pair.url, (victim,), 16) as load:
        strike(pair, load, "one group")
    assert all(error.startswith((*ERRORS, *OF_THE_GATEWAY)) for error in load.errors()), load.errors()
    assert places(pair, victim) == {victim: {HEAD}}
    until(lambda: promised(pair) == {(victim, HEAD)}, "the lost node's promises to be void")
    after = pair.records()
    assert (after["models"], after["deployments"]) == (before["models"], before["deployments"])
    assert after["operations"] >= before["operations"]
    pair.perform("DELETE", f"/deployments/{victim}")


def test_a_group_that_must_share_a_node_waits_for_that_node(pair: HostPair) -> None:
    """They may not share one: what is left answers alone until the node is back."""
    pair.kill_node(OTHER)
    pair.start_node(OTHER)
    until(
        lambda: OTHER in {n["name"] for n in pair.get("/cluster")["nodes"] if n["usable"]},
        "the node",
    )
    deploy(pair, TWINS, antiAffinity=APART, replicas={"min": 2, "max": 2})
    until(lambda: sorted(map(sorted, places(pair, TWINS).values())) == [[HEAD], [OTHER]], "two groups")
    with Load(pair.url, (TWINS,), 16) as load:
        strike(pair, load, "one of two groups")
        until(lambda: list(places(pair, TWINS).values()) == [{HEAD}], "one group")
        found = pair.get(f"/deployments/{TWINS}")
        assert found["phase"] == "Deployed"
        assert "meanwhile 1 of 2 groups answer" in found["reason"]
        pair.start_node(OTHER)
        until(lambda: len(places(pair, TWINS)) == 2, "both groups again")
    assert all(error.startswith((*ERRORS, *OF_THE_GATEWAY)) for error in load.errors()), load.errors()
    assert sorted(map(sorted, places(pair, TWINS).values())) == [[HEAD], [OTHER]]
