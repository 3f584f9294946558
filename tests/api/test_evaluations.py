"""Figures of quality that are kept with a model: what is taken, refused and shown, and what remains."""

from __future__ import annotations

from typing import Any

import pytest

from controlplane.management.evaluations import MOST
from testkit.api.installations import Installation, Start

RIGHT = {"task": "sums", "metric": "exact_match", "value": 0.75, "low": 0.6, "high": 0.86, "items": 40}
DIVERGENCE = {"task": "sums", "metric": "kl", "value": 0.01, "items": 40, "tokens": 90, "reference": "whole"}


@pytest.fixture
def registered(fresh: Installation) -> Installation:
    assert fresh.register("base", folder="base")["phase"] == "Ready"
    return fresh


def put(asked: Installation, *figures: Any, name: str = "base") -> Any:
    return asked.http.put(f"/models/{name}/evaluations", json={"evaluations": figures})


def kept(asked: Installation) -> list[Any]:
    found: list[Any] = asked.http.get("/models/base/evaluations").json()["evaluations"]
    return found


def test_figures_are_kept_and_described(registered: Installation) -> None:
    assert kept(registered) == []
    reply = put(registered, RIGHT, DIVERGENCE)
    assert reply.status_code == 200
    found = reply.json()["evaluations"]
    assert {name: found[0][name] for name in RIGHT} == RIGHT
    assert (found[1]["reference"], found[1]["low"], found[1]["coverage"]) == ("whole", None, 1.0)
    assert all(each["measuredAt"] > 0 for each in found)
    assert kept(registered) == found == registered.http.get("/models/base").json()["evaluations"]


def test_a_newer_figure_replaces_only_the_figure_of_its_subject(registered: Installation) -> None:
    put(registered, RIGHT, DIVERGENCE, {**DIVERGENCE, "reference": "another"})
    put(registered, {**RIGHT, "value": 0.8})
    found = [(each["metric"], each["reference"], each["value"]) for each in kept(registered)]
    assert found == [("kl", "whole", 0.01), ("kl", "another", 0.01), ("exact_match", "", 0.8)]


def test_the_oldest_go_when_there_are_too_many(registered: Installation) -> None:
    for first in range(0, MOST, 64):  # a body has its limit
        put(registered, *({**RIGHT, "task": f"t{n}"} for n in range(first, first + 64)))
    put(registered, *({**RIGHT, "task": f"u{n}"} for n in range(3)))
    names = [*(f"t{n}" for n in range(3, MOST)), "u0", "u1", "u2"]
    assert [each["task"] for each in kept(registered)] == names


def test_evaluations_survive_a_restart_and_end_with_the_registration(start: Start) -> None:
    first = start()
    first.register("base", folder="base")
    put(first, RIGHT)
    again = start()
    assert [each["value"] for each in kept(again)] == [0.75]
    assert again.end(again.http.delete("/models/base"))["phase"] == "Deleted"
    assert again.http.get("/models/base/evaluations").json()["error"]["code"] == "model_not_found"
    again.register("base", folder="base")
    assert kept(again) == []


@pytest.mark.parametrize(
    "figures",
    [
        [],
        [{**RIGHT, "value": 1.5}],
        [{**RIGHT, "value": -0.1}],
        [{**RIGHT, "value": "NaN"}],
        [{**RIGHT, "metric": "bleu"}],
        [{**RIGHT, "reference": "whole"}],
        [{**DIVERGENCE, "reference": ""}],
        [{**DIVERGENCE, "coverage": 1.1}],
        [{**RIGHT, "items": 0}],
        [{**RIGHT, "task": ""}],
        [{**RIGHT, "more": 1}],
        [{"task": "sums"}],
    ],
)
def test_figures_that_cannot_be_are_refused(registered: Installation, figures: list[Any]) -> None:
    before = registered.records()
    reply = put(registered, *figures)
    assert (reply.status_code, reply.json()["error"]["code"]) == (400, "invalid_request")
    assert registered.records() == before


def test_a_model_that_is_not_there_keeps_nothing(registered: Installation) -> None:
    reply = put(registered, RIGHT, name="none")
    assert (reply.status_code, reply.json()["error"]["code"]) == (404, "model_not_found")
