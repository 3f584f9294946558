"""Every call of the API with a key of every role: a call without a decided role fails here."""

from __future__ import annotations

import pytest
from fastapi import FastAPI
from starlette.routing import Route

from controlplane.api.access import NEEDED, OPEN_PATHS
from controlplane.state.terms import Role
from testkit.api import tenants
from testkit.api.installations import Installation, Start

LEAST = {
    "GET /healthz": "nobody",
    "GET /readyz": "nobody",
    "GET /health": "nobody",
    "GET /ping": "nobody",
    "GET /docs": "nobody",
    "GET /version": "inference",
    "POST /v1/chat/completions": "inference",
    "POST /v1/completions": "inference",
    "POST /v1/responses": "inference",
    "POST /v1/messages": "inference",
    "POST /v1/messages/count_tokens": "inference",
    "POST /tokenize": "inference",
    "POST /detokenize": "inference",
    "POST /inference_model": "inference",
    "GET /v1/models": "inference",
    "GET /v1/models/{name:path}": "inference",
    "GET /openapi.json": "inference",
    "POST /v1/load_lora_adapter": "deployer",
    "POST /v1/unload_lora_adapter": "deployer",
    "POST /register_model": "deployer",
    "POST /deploy_model": "deployer",
    "POST /plan": "deployer",
    "GET /models": "deployer",
    "GET /models/{name:path}": "deployer",
    "DELETE /models/{name:path}": "deployer",
    "GET /models/{name:path}/profile": "deployer",
    "POST /models/{name:path}/profile": "deployer",
    "POST /models/{name:path}/estimate": "deployer",
    "POST /models/{name:path}/plans": "deployer",
    "GET /models/{name:path}/evaluations": "deployer",
    "PUT /models/{name:path}/evaluations": "deployer",
    "GET /deployments": "deployer",
    "GET /deployments/{name:path}": "deployer",
    "PATCH /deployments/{name:path}": "deployer",
    "DELETE /deployments/{name:path}": "deployer",
    "POST /deployments/{name:path}/prefetch": "deployer",
    "GET /deployments/{name:path}/logs": "deployer",
    "GET /operations": "deployer",
    "GET /operations/{operation_id}": "deployer",
    "GET /operations/{operation_id}/watch": "deployer",
    "POST /operations/{operation_id}/cancel": "deployer",
    "GET /status": "deployer",
    "GET /cluster": "admin",
    "POST /rebalance": "admin",
    "GET /metrics": "admin",
    "GET /metrics/targets": "admin",
}
RANKS = ["nobody", "inference", "deployer", "admin"]
WHO = {"nobody": "nobody", "reader": "inference", "maker": "deployer", "chief": "admin"}


@pytest.fixture(scope="module")
def standing(start_shared: Start, tmp_path_factory: pytest.TempPathFactory) -> Installation:
    return tenants.started(start_shared, tmp_path_factory.mktemp("tenants") / "tenants.json")


def calls(app: FastAPI) -> set[str]:
    routes = [route for route in app.routes if isinstance(route, Route)]
    assert len(routes) == len(app.routes), "a mounted application has calls that are not looked at"
    return {f"{method} {r.path}" for r in routes for method in (r.methods or set()) - {"HEAD"}}


def test_every_call_was_decided_about(standing: Installation) -> None:
    assert calls(standing.app) == LEAST.keys()
    decided = {f"{method} {path}": role for (method, path), role in NEEDED.items()}
    assert decided == {call: role for call, role in LEAST.items() if role != "nobody"}
    assert {f"GET {path}" for path in OPEN_PATHS} == {c for c, role in LEAST.items() if role == "nobody"}


@pytest.mark.parametrize("who", WHO)
def test_a_role_opens_its_calls_and_no_other(standing: Installation, who: str) -> None:
    for call, least in LEAST.items():
        method, path = call.split()
        where = path.replace("{name:path}", "nothing").replace("{operation_id}", "op-0")
        body = (
            {"dryRun": True} if path == "/rebalance" else {} if method in ("POST", "PUT", "PATCH") else None
        )
        answer = tenants.As(standing, who).ask(method, where, body)
        if least == "nobody" or RANKS.index(WHO[who]) >= RANKS.index(least):
            assert answer.status_code not in (401, 403, 500), (call, answer.text)
        elif who == "nobody":
            assert tenants.code(answer) == (401, "unauthorized"), call
        else:
            assert tenants.code(answer) == (403, "forbidden"), call
            assert least in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    "call",
    [
        "GET /nowhere",
        "GET /cluster/",
        "GET //cluster",
        "PATCH /models/a",
        "POST /models",
        "HEAD /cluster",
    ],
)
def test_unlisted_calls_are_for_admins(standing: Installation, call: str) -> None:
    method, path = call.split()
    url = standing.url + path  # as it is written
    for who, refused in (("reader", True), ("maker", True), ("chief", False)):
        headers = {"Authorization": f"Bearer {tenants.key_of(who)}"}
        status = standing.http.request(method, url, headers=headers).status_code
        assert (status == 403) is refused, (who, status)


def test_without_an_installation_key_every_caller_may_do_everything(start: Start) -> None:
    open_to_all = start()
    assert open_to_all.http.get("/cluster", headers={"Authorization": "Bearer x"}).status_code == 200


def test_an_admins_key_does_what_the_installations_does(standing: Installation) -> None:
    chief = tenants.As(standing, "chief")
    assert chief.register("of-chief", base="", folder="base")["phase"] == "Ready"
    assert standing.http.get("/models/of-chief").json()["tenant"] == ""
    assert tenants.As(standing, "maker").ask("GET", "/models/of-chief").status_code == 200
    assert chief.ask("DELETE", "/models/of-chief").status_code == 200


def test_roles_are_ranked_as_they_are_listed() -> None:
    assert list(Role) == RANKS[1:]
