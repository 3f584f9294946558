"""A gateway passes every request of an evaluation of a deployed model, however long a text is."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest

from controlplane import errors
from controlplane.api.request_bounds import DEFAULTS, check
from controlplane.client.answerer import TOP, ApiAnswerer
from profiler.evaluation.types import Form, Pair


class Gateway:
    """A stand-in for a client: bounds like a gateway's, and a token for each four characters."""

    def __init__(self) -> None:
        self.tops: list[int] = []

    def complete(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        check(body, len(json.dumps(body)), DEFAULTS)
        text = body.get("prompt") or "".join(message["content"] for message in body["messages"])
        ids = list(range(len(text) // 4))
        told: dict[str, Any] = {"prompt_token_ids": ids, "prompt_logprobs": None}
        if (top := body.get("prompt_logprobs")) is not None:
            self.tops.append(top)
            told["prompt_logprobs"] = [None, *({str(token): {"logprob": -1.0}} for token in ids[1:])]
        return {**told, "choices": [told]}


@pytest.mark.parametrize("form", [Form.RAW, Form.CHAT])
@pytest.mark.parametrize(("characters", "tops"), [(200, {TOP}), (2_000, range(2, TOP)), (7_000, range(1, 3))])
def test_a_longer_text_asks_for_fewer_likely_tokens(
    form: Form, characters: int, tops: range | set[int]
) -> None:
    gateway = Gateway()
    answerer = ApiAnswerer(gateway, "m", concurrency=1)  # type: ignore[arg-type]
    answerer.distributions([Pair("what? ", "x" * characters, form)])
    assert len(gateway.tops) == 1
    assert gateway.tops[0] in tops


@pytest.mark.parametrize("characters", [200, 7_000, 14_000])
def test_a_score_reports_each_token_alone(characters: int) -> None:
    gateway = Gateway()
    ApiAnswerer(gateway, "m", concurrency=1).score([Pair("", "x" * characters, Form.RAW)])  # type: ignore[arg-type]
    assert gateway.tops == [0]


def test_a_text_beyond_the_bound_is_refused_with_the_settings_name() -> None:
    with pytest.raises(errors.InvalidRequest, match="log-probabilities"):
        ApiAnswerer(Gateway(), "m").score([Pair("", "x" * 20_000, Form.RAW)])  # type: ignore[arg-type]
