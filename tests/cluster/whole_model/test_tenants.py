"""A tenant's requests that cost more than they seem to: they end, are charged rightly, and others go on."""

from __future__ import annotations

import json
import threading
from typing import Any

import httpx
import pytest

from testkit.cluster.clusters import GIVE_UP_S, Cluster, until
from testkit.cluster.served import BASE, MAX_OUTPUT
from tests.cluster.whole_model.conftest import TOKENS_PER_MINUTE

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3000)]

READ = 5  # events
LONGEST = MAX_OUTPUT - 50
ASKED: dict[str, Any] = {"model": BASE, "prompt": "Once upon a time", "ignore_eos": True}
LONG = {**ASKED, "max_tokens": LONGEST, "stream": True}
STREAMED = 100  # tokens of another client's stream
ALIVE = 3  # events that it gets at least while a grammar is compiled


def running(cluster: Cluster) -> float:
    return cluster.engine_metric("vllm:num_requests_running", BASE)


def made(cluster: Cluster) -> float:
    return cluster.engine_metric("vllm:generation_tokens_total", BASE)


def cut(http: httpx.Client) -> None:
    """Read the first events of a long stream, and leave."""
    with http.stream("POST", "/v1/completions", json=LONG) as reply:
        assert reply.status_code == 200, reply.read()
        lines = (line for line in reply.iter_lines() if line.startswith("data: {"))
        for _ in range(READ):
            next(lines)


def test_a_cut_stream_ends_in_the_engine_and_costs_what_was_made(
    whole: Cluster, limited: httpx.Client
) -> None:
    """The quota has room for one such request and half of another. So the second is served only if the first
    was charged less than it asked for."""
    assert LONGEST < TOKENS_PER_MINUTE < 2 * LONGEST
    until(lambda: running(whole) == 0, "the engine has no request")
    for _ in range(2):
        before = made(whole)
        cut(limited)
        until(lambda: running(whole) == 0, "the engine ended the request")
        assert READ <= made(whole) - before < LONGEST
    answer = limited.post("/v1/completions", json={**ASKED, "max_tokens": 3})
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["completion_tokens"] == 3


TOO_SLOW = {
    "type": "object",
    "properties": {
        f"o{k}": {"type": "object", "properties": {f"{k}p{i}": {} for i in range(500)}} for k in range(8)
    },
}
TOO_LARGE = {
    "type": "array",
    "items": {"type": "integer", "multipleOf": 3},
    "minItems": 10**5,
    "maxItems": 10**6,
}


class Reader(threading.Thread):
    """Reads a stream to its end, and counts its events."""

    def __init__(self, http: httpx.Client) -> None:
        super().__init__()
        self._http = http
        self.events: list[str] = []
        self.begun = threading.Event()
        self.start()

    def run(self) -> None:
        with self._http.stream("POST", "/v1/completions", json={**LONG, "max_tokens": STREAMED}) as reply:
            for line in reply.iter_lines():
                if line.startswith("data: "):
                    self.events.append(line.removeprefix("data: "))
                    self.begun.set()


@pytest.mark.parametrize(
    ("schema", "said"), [(TOO_SLOW, "more than 4 s of CPU time"), (TOO_LARGE, "more than 512 MiB of memory")]
)
def test_a_grammar_beyond_its_limits_is_refused_and_other_streams_go_on(
    whole: Cluster, other: httpx.Client, schema: dict[str, Any], said: str
) -> None:
    """The stream gets events while the grammar is compiled. It gets none if that holds the server's loop."""
    asked = {"model": BASE, "prompt": "a", "max_tokens": 2}
    with whole.client(whole.settings.api_key) as http:
        stream = Reader(http)
        assert stream.begun.wait(GIVE_UP_S)
        before = len(stream.events)
        refusal = other.post(
            "/v1/completions", json={**asked, "structured_outputs": {"json": schema}}, timeout=GIVE_UP_S
        )
        during = len(stream.events) - before
        stream.join(GIVE_UP_S)
    assert refusal.status_code == 400, refusal.text
    assert said in refusal.json()["error"]["message"]
    assert refusal.json()["error"]["param"] == "structured_outputs"
    assert during >= ALIVE or before + during == len(stream.events)
    assert stream.events[-1] == "[DONE]"
    assert json.loads(stream.events[-2])["choices"][0]["finish_reason"] == "length"
    good = other.post("/v1/completions", json={**asked, "structured_outputs": {"choice": ["yes", "no"]}})
    assert good.status_code == 200, good.text
