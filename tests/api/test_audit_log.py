"""The audit log's lines for requested changes, over HTTP; no key is written there or elsewhere."""

from __future__ import annotations

import json
import logging
from hashlib import sha256
from pathlib import Path
from typing import Any

import httpx
import pytest

from testkit.api import tenants
from testkit.api.installations import Installation, Start, wait_for
from testkit.api.tenants import As, key_of

WRONG = "a-key-that-nobody-has"


@pytest.fixture
def made(start: Start, tmp_path: Path) -> Installation:
    return tenants.started(start, tmp_path / "tenants.json")


def lines(installation: Installation) -> list[dict[str, Any]]:
    return [
        json.loads(line) for line in (installation.settings.home / "audit.jsonl").read_text().splitlines()
    ]


def asked(installation: Installation) -> list[dict[str, Any]]:
    return [line for line in lines(installation) if line["event"] == "request"]


def digits(key: str) -> str:
    return sha256(key.encode()).hexdigest()[:8]


def test_every_requested_change_is_a_line_even_if_it_is_refused(made: Installation) -> None:
    maker, reader, nobody = (As(made, name) for name in ("maker", "reader", "nobody"))
    made.register("base")
    body = {"model": "mine", "base": "base", "adapter": str(made.files / "v1")}
    accepted = maker.ask("POST", "/register_model", body, **{"Idempotency-Key": "k"})
    made.end(accepted)
    maker.ask("POST", "/register_model", body)  # 409
    maker.ask("POST", "/register_model", {"model": 5})  # 400
    maker.ask("DELETE", "/models/base")  # 403, for it belongs to another tenant
    reader.ask("DELETE", "/models/mine?reason=x")  # 403, for its role
    nobody.ask("PATCH", "/deployments/base", {})  # 401
    made.http.post("/register_model", headers={"Authorization": ""}, json=body)  # 401
    maker.ask("DELETE", "/models/mine")
    # None of these is a change.
    maker.complete("base")
    reader.ask("POST", "/inference_model", {"model": "base", "inputText": "a"})
    maker.ask("GET", "/models")
    nobody.ask("GET", "/models")
    register, mine = ("POST", "/register_model"), "/models/mine"
    seen = [
        (
            line["tenant"],
            line["role"],
            (line["method"], line["path"]),
            line["model"],
            line["status"],
            line["code"],
        )
        for line in asked(made)
    ]
    assert seen == [
        ("default", "admin", register, "base", 202, None),
        ("maker", "deployer", register, "mine", 202, None),
        ("maker", "deployer", register, "mine", 409, "already_exists"),
        ("maker", "deployer", register, None, 400, "invalid_request"),
        ("maker", "deployer", ("DELETE", "/models/base"), "base", 403, "forbidden"),
        ("reader", "inference", ("DELETE", mine), "mine", 403, "forbidden"),
        (None, None, ("PATCH", "/deployments/base"), "base", 401, "unauthorized"),
        (None, None, register, None, 401, "unauthorized"),
        ("maker", "deployer", ("DELETE", mine), "mine", 200, None),
    ]
    keys = [tenants.OWN_KEY, *[key_of("maker")] * 4, key_of("reader"), key_of("nobody"), "", key_of("maker")]
    assert [line["key"] for line in asked(made)] == [digits(key) if key else "" for key in keys]
    assert [line["idempotencyKey"] for line in asked(made)] == [False, True, *[False] * 7]
    assert asked(made)[1]["operation"] == accepted.json()["id"]
    assert {line["client"] for line in asked(made)} == {"127.0.0.1"}


def test_operations_ends_are_written_down_with_who_asked(made: Installation) -> None:
    maker = As(made, "maker")
    made.up()
    torn = maker.register("torn", base="", folder="torn")
    mine = maker.register("mine")
    deployed = maker.deploy("mine")
    undeployed = made.end(made.http.delete("/deployments/mine"))
    deleted = maker.ask("DELETE", "/models/mine").json()
    expected = {
        torn["id"]: ("maker", "register_model", "torn", "Failed", "source_unreadable"),
        mine["id"]: ("maker", "register_model", "mine", "Ready", None),
        deployed["id"]: ("maker", "deploy_model", "mine", "Deployed", None),
        undeployed["id"]: ("default", "undeploy_model", "mine", "Deleted", None),
        deleted["id"]: ("maker", "delete_model", "mine", "Deleted", None),
    }

    def ends() -> dict[str, Any]:
        return {
            line["operation"]: (line["tenant"], line["kind"], line["model"], line["phase"], line["code"])
            for line in lines(made)
            if line["event"] == "operation_ended" and line["model"] != "base"
        }

    wait_for(lambda: ends() == expected)
    assert undeployed["tenant"] == "maker", "whose the model is sees what others do with it"
    of_maker = {line["key"] for line in lines(made) if line["tenant"] == "maker"}
    assert of_maker == {digits(key_of("maker"))}


def test_a_line_is_there_before_the_answer(made: Installation) -> None:
    for number in range(5):
        As(made, "maker").ask("DELETE", f"/models/none-{number}")
        assert asked(made)[-1]["path"] == f"/models/none-{number}"


def test_a_full_disk_fails_no_request(start: Start, tmp_path: Path) -> None:
    made = tenants.started(start, tmp_path / "tenants.json", audit_log="/dev/full")
    made.up()
    assert As(made, "reader").ask("DELETE", "/models/base").status_code == 403
    assert made.registry.get_sample_value("ostinato_audit_lines_lost_total") == 3


def test_a_client_s_text_cannot_forge_a_line(made: Installation) -> None:
    As(made, "maker").ask("POST", "/register_model", {"model": 'x"}\n{"event": "request', "source": "/a"})
    As(made, "maker").ask("DELETE", "/models/a%0A%7B%22event%22")
    assert [line["status"] for line in asked(made)] == [400, 404]


def test_no_key_is_in_a_log_a_line_or_an_answer(made: Installation, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    answers: list[httpx.Response] = []
    made.up()
    for name in ("maker", "reader", "chief", "nobody"):
        who = As(made, name)
        answers += [
            who.complete("base"),
            who.complete("none"),
            who.ask("GET", "/status"),
            who.ask("GET", "/metrics"),
        ]
        answers += [
            who.ask("POST", "/register_model", {"model": f"v-{name}", "base": "base", "adapter": "/x"})
        ]
        answers += [
            who.ask("GET", "/operations"),
            who.ask("GET", "/openapi.json"),
            who.ask("DELETE", "/models/x"),
        ]
    answers += [made.http.get("/operations"), made.http.get("/models")]
    keys = [
        tenants.OWN_KEY,
        WRONG,
        *(key_of(name) for name in ("maker", "reader", "chief", "nobody", "other")),
    ]
    hashes = [sha256(key.encode()).hexdigest() for key in keys]
    written = [path.read_bytes() for path in made.settings.home.rglob("*") if path.is_file()]
    told = b"\n".join(
        [*written, caplog.text.encode(), *(a.content + str(a.headers).encode() for a in answers)]
    )
    assert b"maker" in told
    assert b"already_exists" not in told
    for secret in (*keys, *hashes):
        assert secret.encode() not in told
    calls = made.cluster.scripted("base").calls
    assert calls
    assert not any(secret in json.dumps(calls) for secret in keys)
