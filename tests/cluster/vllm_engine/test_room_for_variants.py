"""A base that is placed again, for a variant that its engine had no room for.

Its engine has another name afterwards, so this is the last that the folder's cluster does.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from testkit.cluster.clusters import Cluster, until
from testkit.cluster.killing import answers
from testkit.cluster.refusing import MODELS, asked_meanwhile, ostinato, refused, register
from testkit.cluster.served import BASE

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3000)]


def test_a_base_that_is_placed_again_has_room(cluster: Cluster, large_delta: Path) -> None:
    """The steps of the refusal. Requests for the base and its variants are answered all the time."""
    until(lambda: all(answers(cluster, model) for model in MODELS), "answers", every_s=0.5)
    (before,) = (group["name"] for group in cluster.get(f"/deployments/{BASE}")["groups"])
    register(cluster, "large", large_delta)
    assert "--place-anew" in refused(cluster, "large")["message"]
    with asked_meanwhile(cluster):
        ended = ostinato(cluster, "tune", BASE, "--place-anew")
    assert ended.returncode == 0, ended.stderr
    assert f"'{BASE}' is served by {BASE}@" in ended.stdout
    until(lambda: before not in group_names(cluster), "the end of the engine that was replaced")
    cluster.perform("POST", "/deploy_model", {"model": "large", "maxOutputLength": 16})
    surprises = set()  # the model's text may be the base's, but it is never as sure of it
    for model in (*MODELS, "large"):
        ask = {"model": model, "prompt": "Once upon a time", "max_tokens": 4, "temperature": 0, "logprobs": 1}
        reply = cluster.http.post("/v1/completions", json=ask)
        assert reply.status_code == 200, reply.text
        (choice,) = reply.json()["choices"]
        surprises.add(tuple(round(each, 2) for each in choice["logprobs"]["token_logprobs"]))
    assert len(surprises) == len(MODELS) + 1, surprises
    for path in ("/deployments/large", "/models/large"):
        cluster.perform("DELETE", path)


def group_names(cluster: Cluster) -> list[str]:
    return [group["name"] for group in cluster.get(f"/deployments/{BASE}")["groups"]]
