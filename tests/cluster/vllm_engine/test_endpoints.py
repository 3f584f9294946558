"""Responses, Messages and the tokenizer's calls on vLLM, on the base and a variant.

A chat with the same prompt says what the answers are to be, and transformers what the tokens are.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from testkit.cluster.clusters import Cluster

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3000)]

MODELS = ["smol", "forte"]
QUESTION = "What is the weather in Paris?"
SAID: list[Any] = [{"role": "user", "content": QUESTION}]


def chatted(client: openai.OpenAI, model: str, tokens: int) -> tuple[str, int]:
    """A chat's text, and the tokens of its prompt."""
    answer = client.chat.completions.create(model=model, messages=SAID, max_tokens=tokens, temperature=0)
    assert answer.usage is not None
    return answer.choices[0].message.content or "", answer.usage.prompt_tokens


# --- tokens --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", MODELS)
def test_tokens_are_those_of_the_model_s_tokenizer(cluster: Cluster, base_folder: Path, model: str) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(base_folder)
    text = "Once upon a time, in Ω"
    found = cluster.http.post("/tokenize", json={"model": model, "prompt": text, "return_token_strs": True})
    assert found.status_code == 200, found.text
    tokens = tokenizer(text)["input_ids"]
    assert found.json()["tokens"] == tokens
    assert found.json()["count"] == len(tokens)
    assert found.json()["token_strs"] == tokenizer.convert_ids_to_tokens(tokens)
    again = cluster.http.post("/detokenize", json={"model": model, "tokens": tokens}).json()
    assert again == {"prompt": tokenizer.decode(tokens)}
    chat = cluster.http.post("/tokenize", json={"model": model, "messages": SAID}).json()
    assert chat["tokens"] == tokenizer.apply_chat_template(
        SAID, add_generation_prompt=True, tokenize=True, return_dict=False
    )


# --- Responses -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", MODELS)
def test_a_response_is_the_chat_s_answer(client: openai.OpenAI, model: str) -> None:
    text, prompt = chatted(client, model, 8)
    asked: dict[str, Any] = {"model": model, "max_output_tokens": 8, "temperature": 0}
    whole = client.responses.create(input=QUESTION, **asked)
    assert (whole.output_text, whole.model) == (text, model)
    assert whole.usage is not None
    assert (whole.usage.input_tokens, whole.usage.output_tokens) == (prompt, 8)
    events = list(client.responses.create(input=SAID, stream=True, **asked))
    kinds = [event.type for event in events]
    assert kinds[0] == "response.created"
    assert kinds[-1] == "response.completed"
    assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == text
    last = events[-1]
    assert last.type == "response.completed"
    assert last.response.output_text == text
    assert last.response.usage == whole.usage
    assert [event.sequence_number for event in events] == list(range(len(events)))


def test_a_response_keeps_to_a_schema(client: openai.OpenAI) -> None:
    form: Any = {"type": "json_schema", "name": "zone", "schema": {"enum": ["utc", "cet"]}}
    answer = client.responses.create(model="smol", input="a", text={"format": form}, max_output_tokens=20)
    assert json.loads(answer.output_text) in ("utc", "cet")


def test_a_response_that_must_be_kept_is_refused_by_name(client: openai.OpenAI) -> None:
    refused: list[dict[str, Any]] = [{"store": True}, {"background": True}, {"previous_response_id": "a"}]
    for more in refused:
        with pytest.raises(openai.BadRequestError, match="responses are not kept") as error:
            client.responses.create(model="smol", input="a", **more)
        assert error.value.param in more


def test_events_of_each_api_come_until_the_client_leaves(cluster: Cluster) -> None:
    for path, body in (
        ("/v1/responses", {"input": "a", "ignore_eos": True, "max_output_tokens": 200}),
        ("/v1/messages", {"messages": SAID, "max_tokens": 200}),
    ):
        asked = {"model": "smol", "stream": True, **body}
        with httpx.stream("POST", cluster.url + path, json=asked, timeout=60, trust_env=False) as answer:
            assert next(answer.iter_lines()).startswith("event: ")
