"""`ostinato deploy`: what it asks, what it shows, and how it says that nothing fits."""

from __future__ import annotations

from typing import Any

import pytest

from testkit.client.command_line import Cli
from testkit.client.fake_api import FakeApi, answer, deployment, error, events, operation

RELAXATION = {
    "constraint": "SLOs.tpot_ms",
    "asked": 1.0,
    "offered": 4.2,
    "factor": 4.2,
    "text": "raise it to 4.2",
}
CHOICE = {
    "inputTokens": 128,
    "outputTokens": 256,
    **{
        "objective": 1.25,
        "unit": "GiB s",
        "alternatives": 12,
        "shapes": 3,
        "basis": "profile",
        "latencyMs": 90.0,
    },
    **{
        "ttftMs": {"value": 12.5, "low": 10.0, "high": 15.0},
        "tpotMs": {"value": 4.5, "low": 4.0, "high": 5.0},
    },
    **{"throughputPerS": 7.5, "utilisation": [0.25], "relaxed": [RELAXATION], "notes": []},
}


def plan(**choice: Any) -> dict[str, Any]:
    return {**deployment()["plan"], "choice": CHOICE | choice}


def test_every_option_reaches_the_api(cli: Cli, api: FakeApi) -> None:
    line = (
        "deploy smol --intent minLat --max-output 64 --e2e-ms 900 --cost 2.5 --accuracy 90 --rate 1.5 "
        "--input-tokens 300 --output-tokens 60 --tp 1 --tp 3 --pp 2 --layers 10,20 --apart-from chat "
        "--apart-by gpu --max-relax 1.5 --min-replicas 2 --max-replicas 4 --target 8 --idle-s 60 "
        "--target-ttft-ms 300 --target-tpot-ms 30 --deadline-ms 5000 --priority low --late drop"
    )
    assert cli(*line.split()).code == 0
    assert api.calls("POST /deploy_model")[0][0] == {
        "model": "smol",
        "maxOutputLength": 64,
        "intent": "minLat",
        "SLOs": {"e2e_ms": 900.0, "cost": 2.5, "accuracy": 90.0},
        "load": {"ratePerS": 1.5, "inputTokens": 300, "outputTokens": 60},
        "tensorParallel": [1, 3],
        "pipelineParallel": [2],
        "layersPerStage": [10, 20],
        "antiAffinity": {"group": "chat", "scope": "gpu"},
        "autoRelax": {"maxFactor": 1.5},
        "replicas": {"min": 2, "max": 4, "targetInFlight": 8.0, "idleS": 60.0},
        "targets": {
            "ttft_ms": 300.0,
            "tpot_ms": 30.0,
            "deadline_ms": 5000.0,
            "priority": "low",
            "late": "drop",
        },
    }


@pytest.mark.parametrize(("least", "most"), [("0", 1), ("3", 3)])
def test_the_most_follows_the_least(cli: Cli, api: FakeApi, least: str, most: int) -> None:
    assert cli("deploy", "smol", "--min-replicas", least).code == 0
    asked = api.calls("POST /deploy_model")[0][0]["replicas"]
    assert (asked["min"], asked["max"]) == (int(least), most)


def test_a_dry_run_shows_the_plan_and_deploys_nothing(cli: Cli, api: FakeApi) -> None:
    api.script("POST /plan", answer({"model": "smol", "host": "smol", "running": False, "plan": plan()}))
    ended = cli("deploy", "smol", "--dry-run")
    assert ended.code == 0
    for words in (
        "nothing was done",
        "rank 0 on n1 cpu:0, layers 0-29, 1.0 GiB",
        "from its profile, first token 10 to 15 ms, each further 4 to 5 ms",
        "up to 7.5 requests/s, busy 25%",
        "1.25 GiB s for an answer of 256 tokens to a prompt of 128, best of 12 layouts",
        "raise it to 4.2",
    ):
        assert words in ended.out
    assert cli("deploy", "smol", "--dry-run", "--json").json["preview"]["plan"]["choice"] == CHOICE
    assert not api.calls("POST /deploy_model")


def test_a_dry_run_names_what_the_deployment_waits_for(cli: Cli, api: FakeApi) -> None:
    waits = "waits until the architecture of 'big' (k) has been measured"
    found = {"model": "smol", "host": "smol", "running": False, "plan": plan(), "waits": waits}
    api.script("POST /plan", answer(found))
    assert f"before that, the deployment {waits}" in " ".join(cli("deploy", "smol", "--dry-run").out.split())


def test_the_status_of_a_deployment_names_reasons_and_relaxed_limits(cli: Cli, api: FakeApi) -> None:
    view = deployment(plan=plan(), load={"ratePerS": 2.0}, antiAffinity={"group": "chat", "scope": "node"})
    api.script("GET /deployments/smol", answer(view))
    out = cli("status", "smol").out
    for words in (
        "2 requests/s expected",
        "no node shared with group chat",
        "best of 12 layouts",
        "raise it to 4.2",
    ):
        assert words in out


@pytest.mark.parametrize(
    ("together", "texts", "hint"),
    [
        (False, ["one way"], "Hint:  one way"),
        (False, ["one way", "or another"], "Hint:  do any of these:\n  - one way\n  - or another"),
        (True, ["this", "and that"], "Hint:  do all of these together:\n  - this\n  - and that"),
    ],
)
def test_a_refusal_lists_feasible_relaxations(
    cli: Cli, api: FakeApi, together: bool, texts: list[str], hint: str
) -> None:
    details = {
        "binding": "SLOs.tpot_ms",
        "together": together,
        "relaxations": [{**RELAXATION, "text": text} for text in texts],
    }
    body = error("no_feasible_plan", "no plan meets it; possible: something", details=details)
    failed = operation("Failed", error=body)
    api.script("GET /operations/op-1/watch", events(failed))
    ended = cli("deploy", "smol")
    assert ended.code == 1
    assert f"Error: no plan meets it\n{hint}\n" in ended.err
    told = cli("deploy", "smol", "--json").error
    assert told["error"]["details"] == details


@pytest.mark.parametrize(
    "line",
    [
        "deploy smol --layers ten",
        "deploy smol --layers 1,,2",
        "deploy smol --tp 0",
        "deploy smol --rate -1",
        "deploy smol --max-relax 0.5",
        "deploy smol --apart-from x --apart-by rack",
        "deploy smol --min-replicas -1",
        "deploy smol --max-replicas 0",
    ],
)
def test_usage_errors_are_explained(cli: Cli, api: FakeApi, line: str) -> None:
    ended = cli(*line.split())
    assert ended.code == 2
    assert not api.calls("POST /deploy_model")


@pytest.mark.parametrize(
    ("at_once", "text"),
    [
        ({"registered": 4, "atOnce": 4, "tooLarge": []}, "Variants at once  all 4 registered\n"),
        (
            {"registered": 5, "atOnce": 2, "tooLarge": ["huge"]},
            "any 2 of 5 registered; huge cannot run: too large for this engine; `ostinato tune smol",
        ),
        ({"registered": 9, "atOnce": 4, "tooLarge": []}, "any 4 of 9 registered\n"),
        ({"registered": 0, "atOnce": 0, "tooLarge": []}, None),
        (None, None),
    ],
)
def test_status_shows_how_many_registered_variants_run_at_once(
    cli: Cli, api: FakeApi, at_once: dict[str, Any] | None, text: str | None
) -> None:
    """The output has a remedy where memory allows fewer variants than there are slots."""
    described = deployment(plan={**plan(), "maxVariants": 4}, variantsAtOnce=at_once)
    api.script("GET /deployments/smol", answer(described))
    api.script("GET /deployments", answer({"deployments": [described]}))
    shown = cli("status", "smol").out
    assert ("Variants at once" in shown) == (text is not None)
    assert text is None or text in shown
    assert ("variants at once" in " ".join(cli("status").out.split())) == (text is not None)
