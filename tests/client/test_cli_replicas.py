"""Replicas in `ostinato status`, and `ostinato rebalance`."""

from __future__ import annotations

from typing import Any

from testkit.client.command_line import Cli
from testkit.client.fake_api import STATUS, FakeApi, answer, deployment, error

GIB = 1 << 30


def group(name: str, phase: str, **fields: Any) -> dict[str, Any]:
    return {
        "name": name,
        "phase": phase,
        "reason": "",
        "failures": 0,
        "retryAt": None,
        "plan": None,
        **fields,
    }


def rank(node: str) -> dict[str, Any]:
    where = {"rank": 0, "stage": 0, "node": node, "device": "h200:0"}
    return where | {"layers": [0, 30], "memoryBytes": GIB, "measuredBytes": None}


MOVE = {
    **{"group": "smol", "ranks": [rank("n1")], "to": [rank("n2")]},
    **{"loadBytes": 2 * GIB, "doubledBytes": 3 * GIB, "startS": 12.0, "tpotMs": 4.0, "toTpotMs": 5.5},
}
FOUND = {
    **{"goal": "free a device", "possible": True, "gain": "h200:0 of node n1 is free of engines"},
    **{"moves": [MOVE], "loadBytes": 2 * GIB, "doubledBytes": 3 * GIB, "began": False},
}


def test_the_groups_of_a_deployment(cli: Cli, api: FakeApi) -> None:
    groups = [
        group("smol", "Serving", plan=deployment()["plan"]),
        group("smol@1", "Pending", reason="node n2 is gone", failures=1),
    ]
    replicas = {"min": 2, "max": 4, "targetInFlight": None, "idleS": 300.0}
    api.script("GET /deployments/smol", answer(deployment(groups=groups, replicas=replicas)))
    out = cli("status", "smol").out
    for words in (
        "1 of 2 serving; 2 to 4, depending on load",
        "Serving, n1 cpu:0",
        "Pending, node n2 is gone",
    ):
        assert words in out


def test_the_engines_of_a_base_are_counted_by_their_status(cli: Cli, api: FakeApi) -> None:
    engine = {"host": "smol", "message": "", "replicas": 1, "variants": []}
    engines = [engine | {"group": g, "status": s} for g, s in (("smol@1", "running"), ("smol@2", "running"))]
    engines.append(engine | {"group": "smol@3", "status": "starting", "replicas": 0})
    api.script("GET /status", answer(STATUS | {"engines": engines}))
    assert "running x2, starting x0" in cli("status").out


def test_the_table_shows_the_devices_of_all_groups(cli: Cli, api: FakeApi) -> None:
    plan = deployment()["plan"]
    sharded = plan | {"tensorParallel": 2, "ranks": [rank("n2"), rank("n3")]}
    groups = [
        group("smol", "Serving", plan=plan),
        group("smol@1", "Serving", plan=sharded),
        group("smol@2", "Serving", plan=plan),
        group("smol@3", "Pending"),
    ]
    api.script("GET /deployments", answer({"deployments": [deployment(groups=groups)]}))
    out = cli("status").out
    assert "n1 cpu:0; n2 h200:0, n3 h200:0; n1 cpu:0" in out
    assert "tensor parallel 1, layers 30, quantization none; tensor parallel 2" in out


def test_only_the_named_replica_settings_change(cli: Cli, api: FakeApi) -> None:
    replicas = {"min": 2, "max": 4, "targetInFlight": 3.5, "idleS": 60.0}
    api.script("PATCH /deployments/smol", answer(deployment(replicas=replicas)))
    ended = cli("tune", "smol", "--min-replicas", "2")
    assert (ended.code, ended.out) == (0, "'smol' has 2 to 4 engines, depending on load\n")
    more = ("--max-replicas", "4", "--target", "3.5", "--idle-s", "60", "--max-active-variants", "1")
    cli("tune", "smol", *more)
    assert [body for body, _ in api.calls("PATCH /deployments/smol")] == [
        {"replicas": {"min": 2}},
        {"maxActiveVariants": 1, "replicas": {"max": 4, "targetInFlight": 3.5, "idleS": 60.0}},
    ]


def test_replicas_that_cannot_be_are_not_asked_for(cli: Cli, api: FakeApi) -> None:
    for options in (["--target", "0"], ["--idle-s", "0"], ["--profile", "--min-replicas", "2"]):
        assert cli("tune", "smol", *options).code == 2
    assert not api.asked


def test_a_least_number_alone_raises_the_most_when_deploying(cli: Cli, api: FakeApi) -> None:
    for options, asked in (
        (["--min-replicas", "3"], {"min": 3, "max": 3, "idleS": 300.0}),
        (["--min-replicas", "0"], {"min": 0, "max": 1, "idleS": 300.0}),
        ([], None),
    ):
        cli("deploy", "smol", "--no-wait", *options)
        assert api.calls("POST /deploy_model")[-1][0].get("replicas") == asked


def test_a_proposal_and_its_cost(cli: Cli, api: FakeApi) -> None:
    api.script("POST /rebalance", answer(FOUND))
    ended = cli("rebalance", "--dry-run")
    assert ended.code == 0
    for words in (
        "To free a device",
        "n1 h200:0",
        "n2 h200:0",
        "2.0 GiB",
        "3.0 GiB",
        "12 s",
        "4 -> 5.5 ms",
        "nothing was done",
    ):
        assert words in ended.out
    assert cli("rebalance", "--dry-run", "--json").json["rebalance"] == FOUND
    assert [body for body, _ in api.calls("POST /rebalance")] == [{"dryRun": True}] * 2


def test_beginning_one_for_a_model(cli: Cli, api: FakeApi) -> None:
    api.script("POST /rebalance", answer(FOUND | {"began": True}))
    ended = cli("rebalance", "big")
    assert "begun" in ended.out
    ((body, _),) = api.calls("POST /rebalance")
    assert (body["dryRun"], body["deploy"]["model"]) == (False, "big")


def test_nothing_to_gain_and_moves_under_way(cli: Cli, api: FakeApi) -> None:
    nothing = {"goal": "free a device", "possible": False, "gain": "no moves of engines can do this"}
    api.script("POST /rebalance", answer(nothing))
    assert "no moves of engines can do this" in cli("rebalance").out
    api.script("POST /rebalance", answer(error("not_ready", "base@1 is being moved to; wait"), 409))
    ended = cli("rebalance")
    assert ended.code == 1
    assert "being moved" in ended.err
