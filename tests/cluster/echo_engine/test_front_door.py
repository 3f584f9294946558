"""HAProxy before the gateway, in a real cluster: requests come straight to the replica's own server."""

from __future__ import annotations

import json
import re
import socket
from pathlib import Path

import httpx
import psutil
import pytest

from controlplane.runtime.front_door import environment
from testkit.cluster.clusters import Cluster, name, title, until
from testkit.cluster.served import BASE

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3000)]

CHAT = "/v1/chat/completions"
PLAIN = {"model": BASE, "messages": [{"role": "user", "content": "one two"}]}


def test_whole_answers_streams_and_errors(echo_cluster: Cluster) -> None:
    http = echo_cluster.http
    whole = http.post(CHAT, json=PLAIN, headers={"x-request-id": "mine"})
    assert whole.json()["choices"][0]["message"]["content"] == "one two"
    assert whole.headers["x-request-id"] == "mine"
    streamed = http.post(CHAT, json={**PLAIN, "stream": True}).text
    events = [line.removeprefix("data: ") for line in streamed.split("\n\n") if line]
    assert events[-1] == "[DONE]"
    parts = [json.loads(event)["choices"][0]["delta"]["content"] for event in events[:-1]]
    assert parts == ["one", "two", ""]
    refused = http.post(CHAT, json={**PLAIN, "model": "none"})
    assert (refused.status_code, refused.json()["error"]["code"]) == (404, "model_not_found")


def test_a_client_that_leaves_is_noticed(echo_cluster: Cluster) -> None:
    """It reads the start of what no buffer holds, so the rest waits for it."""
    http, left = echo_cluster.http, f'ostinato_requests_total{{code="client_disconnected",model="{BASE}"}} '

    def counted() -> float:
        found = re.search(f"^{re.escape(left)}([0-9.]+)$", http.get("/metrics").text, re.MULTILINE)
        return float(found[1]) if found else 0.0

    before = counted()
    body = {"model": BASE, "prompt": "a " * 1_000_000, "stream": True}
    with http.stream("POST", "/v1/completions", json=body) as reply:
        lines = reply.iter_lines()  # kept: httpx closes the connection when its iterator goes
        next(lines)
        assert f'ostinato_requests_in_flight{{model="{BASE}"}} 1.0' in http.get("/metrics").text
    until(lambda: counted() == before + 1, "the gateway to notice")
    assert f'ostinato_requests_in_flight{{model="{BASE}"}} 0.0' in http.get("/metrics").text


def test_serve_counts_our_requests(echo_cluster: Cluster) -> None:
    """The names are those of Ray's panels of Serve."""
    by_deployment = f'deployment_request_counter_total\\{{.*deployment="Gateway",.*route="{CHAT}"'
    by_front = r'num_http_requests_total\{.*application="ostinato",.*method="POST",.*status_code="200"'
    before = {each: rays_counter(echo_cluster, each) for each in (by_deployment, by_front)}
    for _ in range(7):
        assert echo_cluster.http.post(CHAT, json=PLAIN).status_code == 200
    for each in (by_deployment, by_front):
        until(lambda each=each: rays_counter(echo_cluster, each) >= before[each] + 7, each)  # type: ignore[misc]


def rays_counter(cluster: Cluster, pattern: str) -> float:
    """The sum of a counter of Serve's, from the metrics that Ray's agents export."""
    found = 0.0
    targets = json.loads((Path(cluster.local.temp_dir) / "prom_metrics_service_discovery.json").read_text())
    for address in targets[0]["targets"]:
        text = httpx.get(f"http://{address}/metrics", timeout=60, trust_env=False).text
        found += sum(map(float, re.findall(rf"^ray_serve_{pattern}.*\}} ([0-9.e+]+)$", text, re.MULTILINE)))
    return found


def listening(process: psutil.Process) -> set[tuple[str, int]]:
    found = process.net_connections(kind="tcp")
    return {(c.laddr.ip, c.laddr.port) for c in found if c.status == psutil.CONN_LISTEN}


def test_the_front_door_listens_only_at_the_api_s_address(echo_cluster: Cluster) -> None:
    haproxies = [process for process in echo_cluster.processes() if name(process) == "haproxy"]
    assert set().union(*map(listening, haproxies)) == {("127.0.0.1", echo_cluster.settings.http_port)}


def test_serve_s_own_proxy_answers_no_client(echo_cluster: Cluster) -> None:
    mark = echo_cluster.local.mark
    port = int(environment.of_one_machine(Path("/"), mark)["RAY_SERVE_FALLBACK_PROXY_HTTP_PORT"])
    proxy = echo_cluster.process(lambda name: name.startswith("ray::ProxyActor"), "Serve's own proxy")
    assert ("127.0.0.1", port) in listening(proxy)
    with socket.create_connection(("127.0.0.1", port), 60) as connection:
        connection.settimeout(60)
        try:
            found = connection.recv(1)
        except ConnectionResetError:
            found = b""
    assert found == b""


def test_the_front_door_starts_again_when_its_parent_dies(echo_cluster: Cluster) -> None:
    """Serve's actor that starts HAProxy, and passes it the gateways."""

    def manager() -> psutil.Process:
        return echo_cluster.process(lambda it: it.startswith("ray::HAProxyManager"), "HAProxy's actor")

    victim = manager()
    victim.kill()

    def again() -> bool:
        try:
            return httpx.get(f"{echo_cluster.url}/readyz", trust_env=False).status_code == 200 and (
                manager().pid != victim.pid
            )
        except (httpx.HTTPError, AssertionError):
            return False

    until(again, "the next one's HAProxy")
    haproxies = [title(p) for p in echo_cluster.processes() if name(p) == "haproxy"]
    assert len(haproxies) >= 1
    assert echo_cluster.http.post(CHAT, json=PLAIN).status_code == 200
