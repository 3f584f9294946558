"""The API's own description, and whether it holds for requests that schemathesis makes up."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.errors import Unsatisfiable

from controlplane.api.request_limits import RequestLimits
from testkit.api.installations import Installation, Start


def test_every_route_documents_its_errors(fresh: Installation) -> None:
    described = fresh.http.get("/openapi.json").json()
    for path, operations in described["paths"].items():
        if path in ("/healthz", "/health", "/ping", "/metrics", "/metrics/targets"):
            continue
        for method, operation in operations.items():
            answer = operation["responses"].get("default", {}).get("content", {}).get("application/json")
            assert answer, (method, path)
            assert answer["schema"]["$ref"].endswith("/ErrorBody"), (method, path)


@pytest.fixture
def served_all(start: Start) -> Iterator[Installation]:
    installation = start(request_timeout_s=5, limits=RequestLimits(loading_timeout_s=5))
    installation.up("v1")
    yield installation
    assert installation.in_flight() == 0


@pytest.mark.slow
@pytest.mark.timeout(480)
def test_made_up_requests_get_documented_answers(served_all: Installation) -> None:
    """No answer is a server error, and each is one that the schema describes."""
    import schemathesis  # this takes as long as many tests
    from schemathesis.core.result import Ok

    schema = schemathesis.openapi.from_url(f"{served_all.url}/openapi.json")
    operations = []
    for found in schema.get_all_operations():
        assert isinstance(found, Ok), found
        operations.append(found.ok())
    assert len(operations) > 20
    for operation in operations:
        modes = (schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE)
        for mode in modes:
            _try(operation, mode)


def _try(operation: Any, mode: Any) -> None:
    from schemathesis import GenerationMode
    from schemathesis.checks import not_a_server_error
    from schemathesis.specs.openapi import checks

    wanted: list[Any] = [
        not_a_server_error,
        checks.status_code_conformance,
        checks.content_type_conformance,
        checks.response_schema_conformance,
    ]
    cases: st.SearchStrategy[Any] = operation.as_strategy(generation_mode=mode)

    @settings(max_examples=10, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(case=cases)
    def holds(case: Any) -> None:
        response = case.call(timeout=60)
        case.validate_response(response, checks=wanted)

    try:
        holds()
    except Unsatisfiable:  # a request without parts has none to get wrong
        if mode is not GenerationMode.NEGATIVE:
            raise
