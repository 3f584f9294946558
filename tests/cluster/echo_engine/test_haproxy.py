"""HAProxy before the gateway: requests come straight to the replica's own server."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import ways_in
from clusters import Cluster, until
from served import BASE, MAX_OUTPUT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3000)]

CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def haproxy_cluster(base_folder: Path) -> Iterator[Cluster]:
    made = Cluster("echo", str(base_folder.parent), haproxy=True, cors_origins=ways_in.PAGE)
    try:
        made.up()
        made.serve_base(BASE, str(base_folder), MAX_OUTPUT)
        yield made
        made.down()
    finally:
        made.discard()


def test_answers_errors_and_everything_else(haproxy_cluster: Cluster) -> None:
    http, messages = haproxy_cluster.http, [{"role": "user", "content": "one two"}]
    whole = http.post(CHAT, json={"model": BASE, "messages": messages}, headers={"x-request-id": "mine"})
    assert whole.json()["choices"][0]["message"]["content"] == "one two"
    assert whole.headers["x-request-id"] == "mine"
    streamed = http.post(CHAT, json={"model": BASE, "messages": messages, "stream": True}).text
    events = [line.removeprefix("data: ") for line in streamed.split("\n\n") if line]
    assert events[-1] == "[DONE]"
    parts = [json.loads(event)["choices"][0]["delta"]["content"] for event in events[:-1]]
    assert parts == ["one", "two", ""]
    refused = http.post(CHAT, json={"model": "none", "messages": messages})
    assert (refused.status_code, refused.json()["error"]["code"]) == (404, "model_not_found")
    assert haproxy_cluster.get("/v1/models")["data"][0]["id"] == BASE


def test_haproxy_answers_every_client(haproxy_cluster: Cluster) -> None:
    ways_in.answer_every_client(haproxy_cluster)


def test_a_client_that_leaves_is_noticed(haproxy_cluster: Cluster) -> None:
    """It reads the start of what no buffer holds, so the rest waits for it."""
    http = haproxy_cluster.http
    body = {"model": BASE, "prompt": "a " * 1_000_000, "stream": True}
    with http.stream("POST", "/v1/completions", json=body) as reply:
        lines = reply.iter_lines()  # kept: httpx closes the connection when its iterator goes
        next(lines)
        assert f'ostinato_requests_in_flight{{model="{BASE}"}} 1.0' in http.get("/metrics").text
    left = f'ostinato_requests_total{{code="client_disconnected",model="{BASE}"}} 1.0'
    until(lambda: left in http.get("/metrics").text, "the gateway to notice")
    assert f'ostinato_requests_in_flight{{model="{BASE}"}} 0.0' in http.get("/metrics").text
