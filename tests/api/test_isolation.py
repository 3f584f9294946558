"""A tenant's models do not exist for other tenants; all may use the installation's models, and none may
change them."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from testkit.api import tenants
from testkit.api.installations import Installation, Start
from testkit.api.tenants import As, code, started

CHAT = {"model": "{}", "messages": [{"role": "user", "content": "a"}]}
FIGURE = {"task": "t", "metric": "exact_match", "value": 0.5, "items": 2}
LORA = {"lora_name": "new", "lora_path": "/x", "base_model_name": "{}"}
# The calls about a model by its name, each with the answer for a missing model.
OF_A_MODEL: list[tuple[str, str, Any, str]] = [
    ("POST", "/v1/completions", {"model": "{}", "prompt": "a"}, "model_not_found"),
    ("POST", "/v1/completions", {"model": "base:{}", "prompt": "a"}, "model_not_found"),
    ("POST", "/v1/chat/completions", CHAT, "model_not_found"),
    ("POST", "/inference_model", {"model": "{}", "inputText": "a"}, "model_not_found"),
    ("GET", "/v1/models/{}", None, "model_not_found"),
    ("GET", "/models/{}", None, "model_not_found"),
    ("GET", "/models/{}/profile", None, "model_not_found"),
    ("POST", "/models/{}/profile", {}, "model_not_found"),
    ("POST", "/models/{}/estimate", {}, "model_not_found"),
    ("POST", "/models/{}/plans", {}, "model_not_found"),
    ("GET", "/models/{}/evaluations", None, "model_not_found"),
    ("PUT", "/models/{}/evaluations", {"evaluations": [FIGURE]}, "model_not_found"),
    ("POST", "/deploy_model", {"model": "{}"}, "model_not_found"),
    ("POST", "/plan", {"model": "{}"}, "model_not_found"),
    ("POST", "/register_model", {"model": "new", "base": "{}", "adapter": "/x"}, "model_not_found"),
    ("POST", "/v1/load_lora_adapter", LORA, "model_not_found"),
    ("POST", "/v1/unload_lora_adapter", {"lora_name": "{}"}, "model_not_found"),
    ("DELETE", "/models/{}", None, "model_not_found"),
    ("GET", "/deployments/{}", None, "not_deployed"),
    ("GET", "/deployments/{}/logs", None, "not_deployed"),
    ("PATCH", "/deployments/{}", {"targets": {"priority": "low"}}, "not_deployed"),
    ("POST", "/deployments/{}/prefetch", None, "model_not_found"),
    ("DELETE", "/deployments/{}", None, "not_deployed"),
]  # fmt: skip
# Changes of the installation's models, which a deployer sees.
OF_SHARED: list[tuple[str, str, Any]] = [
    ("DELETE", "/models/v1", None),
    ("DELETE", "/models/base", None),
    ("DELETE", "/deployments/v1", None),
    ("DELETE", "/deployments/base", None),
    ("PATCH", "/deployments/v1", {"targets": {"priority": "low"}}),
    ("PATCH", "/deployments/base", {"maxActiveVariants": 1}),
    ("PATCH", "/deployments/base", {"placeAnew": True}),
    ("POST", "/deployments/v1/prefetch", None),
    ("POST", "/deploy_model", {"model": "v2"}),
    ("POST", "/plan", {"model": "v2"}),
    (
        "PUT",
        "/models/v1/evaluations",
        {"evaluations": [FIGURE]},
    ),
    ("POST", "/models/base/profile", {}),
    ("POST", "/models/base/profile", {"again": True}),
    ("GET", "/deployments/base/logs", None),
    ("GET", "/deployments/v1/logs", None),
    ("POST", "/v1/unload_lora_adapter", {"lora_name": "v1"}),
]


@pytest.fixture(scope="module")
def divided(start_shared: Start, tmp_path_factory: pytest.TempPathFactory) -> Installation:
    """`base` and `v1` are the installation's, with `v2` registered only; `mine` is the maker's."""
    made = tenants.started(start_shared, tmp_path_factory.mktemp("tenants") / "tenants.json")
    made.up("v1")
    assert made.register("v2", "base")["phase"] == "Ready"
    maker = As(made, "maker")
    assert maker.register("mine")["phase"] == "Ready"
    assert maker.deploy("mine")["phase"] == "Deployed"
    return made


def put(name: str, text: Any) -> Any:
    if isinstance(text, dict):
        return {key: put(name, value) for key, value in text.items()}
    return text.replace("{}", name) if isinstance(text, str) else text


@pytest.mark.parametrize(("method", "path", "body", "told"), OF_A_MODEL, ids=lambda value: str(value)[:40])
def test_another_tenant_s_model_is_answered_like_a_missing_model(
    divided: Installation, method: str, path: str, body: Any, told: str
) -> None:
    other = As(divided, "other")
    hidden, nowhere = (other.ask(method, put(name, path), put(name, body)) for name in ("mine", "none"))
    assert code(hidden) == (404, told), hidden.text
    assert hidden.text.replace("mine", "none") == nowhere.text


def test_lists_leave_out_what_another_has(divided: Installation) -> None:
    maker, other, reader, chief = (As(divided, name) for name in ("maker", "other", "reader", "chief"))

    def names(who: As, path: str, field: str, key: str) -> set[str]:
        return {each[key] for each in who.ask("GET", path).json()[field]}

    for who, sees in ((maker, True), (chief, True), (other, False)):
        assert ("mine" in names(who, "/v1/models", "data", "id")) is sees
        assert ("mine" in names(who, "/models", "models", "model")) is sees
        assert ("mine" in names(who, "/deployments", "deployments", "model")) is sees
        assert ("mine" in who.ask("GET", "/status").text) is sees
        assert ("mine" in who.ask("GET", "/deployments/base").text) is sees
        assert ("mine" in who.ask("GET", "/models/base").text) is sees
        assert {"base", "v1"} <= names(who, "/models", "models", "model")
    assert names(reader, "/v1/models", "data", "id") == {"base", "v1"}
    targets = {who.name: names(who, "/operations", "operations", "target") for who in (maker, other, chief)}
    assert targets == {"maker": {"mine"}, "other": set(), "chief": {"base", "v1", "v2", "mine"}}


def test_a_tenants_operations_are_its_own(divided: Installation) -> None:
    maker, other = As(divided, "maker"), As(divided, "other")
    its = maker.ask("GET", "/operations").json()["operations"][0]["id"]
    shared = divided.http.get("/operations").json()["operations"][-1]["id"]
    for who, operation in ((other, its), (other, shared), (maker, shared)):
        for method, end in (("GET", ""), ("GET", "/watch"), ("POST", "/cancel")):
            told = code(who.ask(method, f"/operations/{operation}{end}"))
            assert told == (404, "operation_not_found")
    assert maker.ask("GET", f"/operations/{its}").json()["tenant"] == "maker"
    assert maker.ask("POST", f"/operations/{its}/cancel").status_code == 200


def test_all_ask_what_is_the_installations_and_own_models(divided: Installation) -> None:
    for name in ("reader", "maker", "other", "chief"):
        for model in ("base", "v1", "base:v1"):
            assert As(divided, name).complete(model).status_code == 200
    for name, status in (("maker", 200), ("chief", 200), ("other", 404), ("reader", 404)):
        for model in ("mine", "base:mine"):
            assert As(divided, name).complete(model).status_code == status


@pytest.mark.parametrize(("method", "path", "body"), OF_SHARED, ids=lambda value: str(value)[:40])
def test_a_deployer_changes_nothing_of_the_installation(
    divided: Installation, method: str, path: str, body: Any
) -> None:
    before = divided.records()
    answer = As(divided, "maker").ask(method, path, body)
    assert code(answer) == (403, "forbidden"), answer.text
    assert divided.records() == before


def test_a_name_of_another_tenant_is_refused_without_details(divided: Installation) -> None:
    for name, base in (("other", "base"), ("maker", "base")):
        body = {"model": "mine", "base": base, "adapter": str(divided.files / "v2")}
        answer = As(divided, name).ask("POST", "/register_model", body)
        assert code(answer) == (409, "already_exists")
        if name == "other":
            assert "maker" not in answer.text
            assert "delete" not in answer.text, "it cannot"


def test_a_variant_changes_nothing_of_its_shared_base(divided: Installation) -> None:
    """Its slots are the engine's; the base's records stay as they are."""
    before = divided.records()
    other = As(divided, "other")
    assert other.register("theirs", folder="v2")["phase"] == "Ready"
    tight = {"model": "theirs", "SLOs": {"accuracy": 90}}
    assert code(other.ask("POST", "/deploy_model", tight)) == (403, "forbidden")
    assert other.deploy("theirs")["phase"] == "Deployed"
    assert other.ask("POST", "/deployments/theirs/prefetch").status_code == 200
    tuned = other.ask("PATCH", "/deployments/theirs", {"targets": {"priority": "low"}})
    assert tuned.json()["targets"]["priority"] == "low"
    for kind in (0, 1):
        assert before[kind].items() <= divided.records()[kind].items()
    assert other.end(other.ask("DELETE", "/deployments/theirs"))["phase"] == "Deleted"
    assert other.ask("DELETE", "/models/theirs").json()["phase"] == "Deleted"


def test_a_shared_base_is_not_deployed_by_deploying_a_variant(start: Start, tmp_path: Path) -> None:
    made = tenants.started(start, tmp_path / "tenants.json")
    made.register("base")
    maker = As(made, "maker")
    maker.register("mine")
    assert code(maker.ask("POST", "/deploy_model", {"model": "mine"})) == (403, "forbidden")
    assert made.http.get("/deployments").json() == {"deployments": []}


def test_a_deployer_owns_its_base_and_all_variants_of_the_base(start: Start, tmp_path: Path) -> None:
    made = tenants.started(start, tmp_path / "tenants.json")
    maker, other = As(made, "maker"), As(made, "other")
    assert maker.register("ours", base="", folder="base")["phase"] == "Ready"
    assert maker.deploy("ours")["phase"] == "Deployed"
    assert made.register("by-admin", "ours", folder="v1")["phase"] == "Ready"
    assert maker.ask("GET", "/models/by-admin").json()["tenant"] == "maker"
    assert maker.ask("GET", "/deployments/ours/logs").status_code == 200
    assert code(other.complete("ours")) == (404, "model_not_found")
    assert other.ask("GET", "/status").json()["engines"] == []
    assert [engine["host"] for engine in maker.ask("GET", "/status").json()["engines"]] == ["ours"]
    assert maker.end(maker.ask("DELETE", "/deployments/ours"))["phase"] == "Deleted"


def test_idempotency_keys_are_each_tenants_own(start: Start, tmp_path: Path) -> None:
    made = tenants.started(start, tmp_path / "tenants.json")
    made.register("base")
    ids = set()
    for name in ("maker", "other", "maker"):
        body = {"model": f"of-{name}", "base": "base", "adapter": str(made.files / "v1")}
        answer = As(made, name).ask("POST", "/register_model", body, **{"Idempotency-Key": "k"})
        assert answer.status_code == 202
        ids.add(answer.json()["id"])
    assert len(ids) == 2
    taken = As(made, "other").ask("POST", "/register_model", body, **{"Idempotency-Key": "k"})
    assert code(taken) == (409, "idempotency_conflict")
    assert "other k" not in taken.text


def test_requests_of_tenants_share_no_prefix_cache(divided: Installation) -> None:
    """Whatever a client sends, its salt begins with its tenant's own."""
    calls = divided.cluster.scripted("base").calls
    salts: dict[str, set[str]] = {}

    def ask(name: str, model: str, **own: str) -> None:
        assert As(divided, name).complete(model, **own).status_code == 200
        salts.setdefault(name, set()).add(calls[-1]["cache_salt"])

    for name, model in product(("maker", "other", "reader"), ("base", "v1")):
        ask(name, model)
        asked = {"model": model, "inputText": "a"}
        assert As(divided, name).ask("POST", "/inference_model", asked).status_code == 200
        salts[name].add(calls[-1]["cache_salt"])
    of_maker = tuple(salts["maker"])
    for own in ("x", ":", *of_maker, of_maker[0].partition(":")[0], "l" * 128, "l" * 127):
        ask("other", "base", cache_salt=own)
    assert len(salts["other"]) == 2 + len(of_maker) + 5, "its own salts stay apart"
    assert max(len(salt) for salt in salts["other"]) <= 128, "vLLM takes no more"
    assert divided.chat("a").status_code == 200
    salts["installation"] = {calls[-1]["cache_salt"]}
    heads = {name: {salt.partition(":")[0] for salt in seen} for name, seen in salts.items()}
    assert all(len(head) == 1 and len(min(head)) == 32 for head in heads.values())
    assert len(set.union(*heads.values())) == len(heads)
    text = str(heads)
    assert tenants.OWN_KEY not in text
    assert not any(name in min(head) for name, head in heads.items())


def test_prefixes_are_looked_for_in_the_tenants_own_cache(divided: Installation) -> None:
    """The router sends a request to where its beginning is cached; another tenant's is of no use to it."""
    seen = []
    for name in ("maker", "other", "maker"):
        assert (
            As(divided, name)
            .ask("POST", "/v1/completions", {"model": "base", "prompt": "a " * 1000})
            .status_code
        )
        seen.append(divided.cluster.heard.beginning)
    assert seen[0] == seen[2] != seen[1]
    assert 0 not in seen


# --- files -----------------------------------------------------------------------------------------------


@pytest.fixture
def apart(start: Start, tmp_path: Path) -> Iterator[Installation]:
    """Each deployer has files of its own, for a base of the installation; one folder has links as well."""
    makers = [tenants.entry(name, "deployer") for name in ("left", "right")]
    made = started(
        start, tmp_path / "tenants.json", *makers, tenants.entry("chief", "admin"), tenant_folders=True
    )
    made.register("base")
    left, right = made.files / "left", made.files / "right"
    for folder in (left, right):
        shutil.copytree(made.files / "v1", folder / "adapter")
    (left / "link").symlink_to(right / "adapter")
    (left / "linked").mkdir()
    for file in (right / "adapter").iterdir():
        (left / "linked" / file.name).symlink_to(file)
    yield made
    for folder in (left, right):
        shutil.rmtree(folder)


def test_a_tenant_registers_what_lies_in_its_own_folder(apart: Installation) -> None:
    left = As(apart, "left")
    assert left.register("own", folder="left/adapter")["phase"] == "Ready"
    assert As(apart, "right").register("theirs", folder="right/adapter")["phase"] == "Ready"


@pytest.mark.parametrize(
    "folder", ["right/adapter", "left/../right/adapter", "left/link", "left/linked", "v1", ""]
)
def test_a_tenant_sees_nothing_of_other_tenants(apart: Installation, folder: str) -> None:
    refused = As(apart, "left").register("stolen", folder=folder)
    assert refused["phase"] == "Failed"
    assert refused["error"]["error"]["code"] == "path_not_allowed"


def test_the_installation_registers_from_everywhere(apart: Installation) -> None:
    assert As(apart, "chief").register("any", folder="left/adapter")["phase"] == "Ready"
    assert apart.register("own", "base", folder="right/adapter")["phase"] == "Ready"
