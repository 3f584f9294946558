"""The limit of variants at once, changed while an engine runs and chosen by measuring."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest

from controlplane.client import variant_limit_profile
from controlplane.client.client import Client
from controlplane.client.variant_limit_profile import Burst
from testkit.cluster.clusters import GIVE_UP_S, Cluster, until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3000)]

BASE = "smol"
LONG = {"prompt": "One, two,", "max_tokens": 500, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def wide(cluster: Cluster) -> Iterator[Client]:
    """Four slots; the variants forte and piano."""
    with Client(cluster.url) as client:
        yield client


def residency(cluster: Cluster) -> dict[str, Any]:
    (engine,) = cluster.get(f"/deployments/{BASE}")["residency"]
    return dict(engine)


def ask(cluster: Cluster, model: str, max_tokens: int = 2) -> None:
    body = {"model": model, "prompt": "Hello", "max_tokens": max_tokens}
    reply = cluster.http.post("/v1/completions", json=body)
    assert reply.status_code == 200, reply.text


def test_n_changes_while_requests_run(wide: Client, cluster: Cluster) -> None:
    wide.tune(BASE, 1)
    for name in ("forte", "piano"):
        ask(cluster, name)
    first_token, seen_together = threading.Event(), threading.Event()

    def second() -> None:
        with closing(wide.chunks("/v1/completions", {**LONG, "model": "piano"})) as chunks:
            for _ in chunks:
                first_token.set()
                if seen_together.is_set():
                    break  # the rest of the answer shows nothing more

    with closing(wide.chunks("/v1/completions", {**LONG, "model": "forte"})) as running:
        next(running)
        waiting = threading.Thread(target=second)
        waiting.start()
        until(lambda: residency(cluster)["blockedRequests"] == 1, "a blocked request")
        assert not first_token.is_set()
        wide.tune(BASE, 2)
        until(lambda: cluster.engine_metric("vllm:num_requests_running", BASE) == 2, "both to run at once")
        assert first_token.wait(GIVE_UP_S)
        next(running)
    seen_together.set()
    waiting.join(GIVE_UP_S)


def test_a_profile_measures_and_applies(wide: Client) -> None:
    burst = Burst(seconds=8, concurrency=4)  # on a busy machine a request takes seconds
    profile = variant_limit_profile.run(wide, BASE, burst, None, print)
    print([json.dumps(vars(m)) for m in profile.measurements])
    assert [m.limit for m in profile.measurements] == [1, 2]
    assert all(m.tokens_per_s > 0 and m.ttft_s > 0 for m in profile.measurements)
    view = wide.deployment(BASE)
    assert view.residency
    assert view.maxActiveVariants == profile.chosen == view.residency[0].limit
