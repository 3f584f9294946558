"""`ostinato evaluate`, of a model whose every answer and log-probability is known."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from fastapi.responses import JSONResponse, Response

from testkit.client.command_line import Cli
from testkit.client.fake_api import FakeApi, answer, error, model

WORDS = ("<s>", "one", "two", "three", "red", "blue")
# ln p of each word, wherever it stands: of the model, and of the one it is compared with.
MINE = {"one": 0.5, "two": 0.25, "three": 0.125, "red": 0.0625, "blue": 0.03125, "<s>": 0.03125}
THEIRS = {"one": 0.25, "two": 0.25, "three": 0.25, "red": 0.125, "blue": 0.0625, "<s>": 0.0625}


def ids_of(text: str) -> list[int]:
    return [0, *(WORDS.index(word) for word in text.split())]


def row(chances: Mapping[str, float], own: int, top: int) -> dict[str, Any]:
    """vLLM's form: the likeliest tokens, and the actual one."""
    likeliest = sorted(chances, key=lambda word: -chances[word])[:top]
    told = {*likeliest, WORDS[own]}
    return {
        str(WORDS.index(w)): {"logprob": math.log(chances[w]), "rank": 1, "decoded_token": w} for w in told
    }


def scripted(api: FakeApi, said: str = " two\n") -> None:
    """Completions of both models; each request is answered as it asks."""

    def completion() -> Response:
        body = api.asked[-1][1]
        chances = MINE if body["model"] == "smol" else THEIRS
        choice: dict[str, Any] = {"index": 0, "text": said, "finish_reason": "stop"}
        if body.get("return_token_ids"):
            choice["prompt_token_ids"] = ids_of(body["prompt"])
        if (top := body.get("prompt_logprobs")) is not None:
            choice["prompt_logprobs"] = [None, *(row(chances, i, top) for i in ids_of(body["prompt"])[1:])]
        return JSONResponse({"choices": [choice]})

    def kept() -> Response:
        asked = api.asked[-1][1]["evaluations"]
        blank = {"low": None, "high": None, "tokens": 0, "reference": "", "coverage": 1, "digest": ""}
        return JSONResponse({"evaluations": [{**blank, **each, "measuredAt": 86400.0} for each in asked]})

    api.script("POST /v1/completions", completion)
    api.script("PUT /models/smol/evaluations", kept)
    api.script("GET /models/whole", answer(model("whole")))


def write(folder: Path, name: str, *rows: Any) -> Path:
    path = folder / f"{name}.jsonl"
    path.write_text("\n".join(json.dumps(each) for each in rows))
    return path


def test_exact_matches_are_counted_kept_and_shown(cli: Cli, api: FakeApi, tmp_path: Path) -> None:
    scripted(api)
    items = [{"prompt": "one one", "answer": "two"}] * 3 + [{"prompt": "one one", "answer": "three"}]
    header = {"task": "sums", "maxTokens": 5, "stop": ["."]}
    ended = cli("evaluate", "smol", str(write(tmp_path, "file", header, *items)))
    assert ended.code == 0, ended.err
    assert "sums" in ended.out
    assert "75.0%" in ended.out
    assert "sums: 4 of 4 answers of 'smol'" in ended.err
    asked = [body for body, _ in api.calls("POST /v1/completions")]
    assert len(asked) == 4
    assert asked[0] == {
        **{"model": "smol", "prompt": "one one", "max_tokens": 5, "stop": ["."]},
        **{"temperature": 0, "repetition_penalty": 1.0},
    }
    ((sent, _),) = api.calls("PUT /models/smol/evaluations")
    (form,) = sent["evaluations"]
    assert (form["task"], form["metric"], form["value"], form["items"]) == ("sums", "exact_match", 0.75, 4)


def test_choices_are_by_the_log_probability_after_the_prompt(cli: Cli, api: FakeApi, tmp_path: Path) -> None:
    scripted(api)
    items = [
        {"prompt": "red", "choices": [" three", " two", " two two two"], "answer": 1},
        {"prompt": "red", "choices": [" two", " one"], "answer": 0},
    ]
    ended = cli("evaluate", "smol", str(write(tmp_path, "pick", *items)), "--json")
    (found,) = ended.json["evaluations"]
    assert (found["metric"], found["value"], found["items"]) == ("multiple_choice", 0.5, 2)
    assert len(api.calls("POST /v1/completions")) == 1 + 5  # the context once, and each choice


def test_texts_have_a_perplexity_and_a_divergence(cli: Cli, api: FakeApi, tmp_path: Path) -> None:
    scripted(api)
    texts = [{"text": "one two"}, {"text": "three one one"}]
    path = write(tmp_path, "tales", *texts)
    ended = cli("evaluate", "smol", str(path), "--reference", "whole", "--json")
    assert ended.code == 0, ended.err
    surprise, divergence = ended.json["evaluations"]
    words = ["one", "two", "three", "one", "one"]
    mean = -sum(math.log(MINE[word]) for word in words) / len(words)
    assert surprise["value"] == pytest.approx(math.exp(mean))
    assert surprise["tokens"] == 5
    nats = sum(THEIRS[w] * math.log(THEIRS[w] / MINE[w]) for w in WORDS)
    assert (divergence["metric"], divergence["reference"]) == ("kl", "whole")
    assert divergence["value"] == pytest.approx(nats)
    assert divergence["coverage"] == pytest.approx(1)


def test_only_the_first_items_and_all_files_of_a_folder(cli: Cli, api: FakeApi, tmp_path: Path) -> None:
    scripted(api)
    for name in ("b", "a"):
        write(tmp_path, name, *[{"prompt": "one", "answer": "two"}] * 5)
    ended = cli("evaluate", "smol", str(tmp_path), "--limit", "2", "--json")
    assert [(e["task"], e["items"]) for e in ended.json["evaluations"]] == [("a", 2), ("b", 2)]


def test_a_chat_is_asked_as_a_chat(cli: Cli, api: FakeApi, tmp_path: Path) -> None:
    scripted(api)
    spoken = {"choices": [{"message": {"role": "assistant", "content": "It is TWO."}}]}
    api.script("POST /v1/chat/completions", answer(spoken))
    header = {"task": "talk", "format": "chat", "normalise": "last_word"}
    path = write(tmp_path, "talk", header, {"prompt": "one", "answer": "two"})
    assert cli("evaluate", "smol", str(path), "--json").json["evaluations"][0]["value"] == 1
    ((asked, _),) = api.calls("POST /v1/chat/completions")
    assert asked["messages"] == [{"role": "user", "content": "one"}]
    assert asked["max_completion_tokens"] == 32


def test_a_chats_choices_are_scored_behind_the_template(cli: Cli, api: FakeApi, tmp_path: Path) -> None:
    scripted(api)

    def told() -> Response:
        messages = api.asked[-1][1]["messages"]
        ids = ids_of(" ".join(["red", *(each["content"] for each in messages)]))
        rows = [None, *(row(MINE, i, 0) for i in ids[1:])]
        choice = {"message": {"content": ""}}
        return JSONResponse({"choices": [choice], "prompt_token_ids": ids, "prompt_logprobs": rows})

    api.script("POST /v1/chat/completions", told)
    header = {"task": "talk", "format": "chat"}
    item = {"prompt": "blue", "choices": ["three", "two"], "answer": 1}
    path = write(tmp_path, "talk", header, item)
    assert cli("evaluate", "smol", str(path), "--json").json["evaluations"][0]["value"] == 1
    asked = [body for body, _ in api.calls("POST /v1/chat/completions")]
    assert [body.get("continue_final_message", False) for body in asked].count(True) == 2
    assert sum(body.get("add_generation_prompt", False) for body in asked) == 1


def test_a_busy_model_is_asked_again(cli: Cli, api: FakeApi, tmp_path: Path) -> None:
    scripted(api)
    (answered,) = api._script["POST /v1/completions"]
    busy = answer(error("overloaded", "too many; later"), 429, Retry_After="0.01")
    api.script("POST /v1/completions", busy, busy, answered)
    path = write(tmp_path, "one", {"prompt": "one", "answer": "two"})
    assert cli("evaluate", "smol", str(path), "--json").json["evaluations"][0]["value"] == 1


def test_a_mistake_is_reported_before_any_work(cli: Cli, api: FakeApi, tmp_path: Path) -> None:
    scripted(api)
    path = write(tmp_path, "bad", {"prompt": "one"})
    ended = cli("evaluate", "smol", str(path))
    assert ended.code == 1
    assert "bad.jsonl, line 1: expected the fields" in ended.err
    good = write(tmp_path, "good", {"prompt": "one", "answer": "two"})
    assert "nothing at GET /models/none" in cli("evaluate", "none", str(good)).err
    assert "nothing at GET /models/none" in cli("evaluate", "smol", str(good), "--reference", "none").err
    assert not api.calls("POST /v1/completions")


def test_an_engine_without_log_probabilities_is_named(cli: Cli, api: FakeApi, tmp_path: Path) -> None:
    scripted(api)
    api.script("POST /v1/completions", answer({"choices": [{"text": "two"}]}))
    ended = cli("evaluate", "smol", str(write(tmp_path, "read", {"text": "one two"})))
    assert ended.code == 1
    assert "the engine of 'smol' returns no log-probabilities" in ended.err
    assert not api.calls("PUT /models/smol/evaluations")


def test_a_refused_prompt_is_quoted(cli: Cli, api: FakeApi, tmp_path: Path) -> None:
    scripted(api)
    api.script("POST /v1/completions", answer(error("context_length_exceeded", "too long; shorten it"), 400))
    ended = cli("evaluate", "smol", str(write(tmp_path, "read", {"text": "one two " * 50})))
    assert "(the request was 'one two one two" in ended.err


def test_describe_shows_what_is_kept(cli: Cli, api: FakeApi) -> None:
    figure = {"task": "sums", "items": 40, "tokens": 0, "reference": "", "coverage": 1.0, "digest": ""}
    right = {**figure, "metric": "exact_match", "value": 0.75, "low": 0.6, "high": 0.86, "measuredAt": 0.0}
    bound = {**right, "metric": "kl", "value": 0.0123, "reference": "whole", "coverage": 0.97, "tokens": 90}
    open_ended = {**right, "metric": "perplexity", "value": 7.5, "low": None, "high": None, "items": 1}
    api.script("GET /models/smol", answer(model(evaluations=[right, bound, open_ended])))
    out = cli("describe", "smol").out
    assert "sums: exact match 75.0% (60.0% to 86.0%), 40 items, 1970-01-01" in out
    assert "KL from 'whole' at least 0.0123 nats" in out
    assert "97.0% of the probability known" in out
    assert "perplexity 7.5, 1 items" in out
