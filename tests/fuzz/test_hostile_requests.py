"""Whatever a client sends over a socket: an answer that is no 5xx, and a gateway that goes on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from testkit.api.installations import Installation
from testkit.fuzz import hostile_http

COUNT = settings().max_examples * 100  # 4,000; `benchmarks.fuzzing.requests` sends more


@pytest.fixture
def gateway(tmp_path: Path) -> Iterator[Installation]:
    with hostile_http.served(tmp_path) as installation:
        yield installation


@pytest.mark.slow
def test_no_request_breaks_a_gateway(gateway: Installation) -> None:
    found = hostile_http.ask(gateway, range(COUNT))
    assert found.broken == []
    assert {200, 202, 400, 404, 405, 409, 413} <= set(found.statuses)
    asked = {route for route, statuses in found.by_route.items() if {200, 202} & set(statuses)}
    assert {"POST /register_model", "POST /v1/chat/completions", "POST /v1/completions"} <= asked
