"""Clients as people have them: the official openai package, LangChain, vLLM's adapter calls."""

from __future__ import annotations

import json
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import openai
import pytest
from openai.types.chat import ChatCompletion, ChatCompletionMessageParam

from testkit.cluster.clusters import Cluster, until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3000)]

BASE = "smol"
CHAT: list[ChatCompletionMessageParam] = [{"role": "user", "content": "What is the capital of France?"}]
PROMPT = "The capital of France is"
NAMES = [BASE, "forte", "piano", "smol:forte", "smol:piano"]


@pytest.mark.parametrize("model", NAMES)
def test_a_chat_is_answered(client: openai.OpenAI, model: str) -> None:
    answer = client.chat.completions.create(model=model, messages=CHAT, max_tokens=8, temperature=0)
    assert answer.object == "chat.completion"
    assert answer.model == model.rpartition(":")[2]
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].message.content
    assert answer.usage is not None
    assert 0 < answer.usage.completion_tokens <= 8
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


@pytest.mark.parametrize("model", NAMES)
def test_chat_streamed_is_chat(client: openai.OpenAI, model: str) -> None:
    options: dict[str, Any] = {"model": model, "messages": CHAT, "max_tokens": 8, "temperature": 0}
    whole = client.chat.completions.create(**options)
    chunks = list(
        client.chat.completions.create(**options, stream=True, stream_options={"include_usage": True})
    )
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == whole.choices[0].finish_reason
    assert len(chunks) > 4
    assert chunks[-1].choices == []
    assert chunks[-1].usage == whole.usage


def test_a_stream_has_no_usage_unless_asked(client: openai.OpenAI) -> None:
    chunks = list(client.chat.completions.create(model=BASE, messages=CHAT, max_tokens=3, stream=True))
    assert all(c.usage is None for c in chunks)


@pytest.mark.parametrize("model", NAMES[:3])
def test_completions_are_answered(client: openai.OpenAI, model: str) -> None:
    options: dict[str, Any] = {"model": model, "prompt": PROMPT, "max_tokens": 8, "temperature": 0}
    whole = client.completions.create(**options)
    streamed = client.completions.create(**options, stream=True)
    assert whole.object == "text_completion"
    assert whole.choices[0].text
    assert "".join(c.choices[0].text for c in streamed if c.choices) == whole.choices[0].text
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 8


def test_a_longer_answer_than_the_deployment_allows_is_cut(client: openai.OpenAI) -> None:
    """Other servers cut it, too. A chat without a length goes on to the limit. One batch has all three."""
    endless: dict[str, Any] = {"extra_body": {"ignore_eos": True}, "temperature": 0}
    wishes: list[dict[str, Any]] = [{"max_tokens": 100_000}, {"max_completion_tokens": 100_000}, {}]

    def answer_to(asked: dict[str, Any]) -> ChatCompletion:
        answer: ChatCompletion = client.chat.completions.create(
            model="forte", messages=CHAT, **asked, **endless
        )
        return answer

    with ThreadPoolExecutor(len(wishes)) as pool:
        answers = list(pool.map(answer_to, wishes))
    for answer in answers:
        assert answer.usage is not None
        assert (answer.choices[0].finish_reason, answer.usage.completion_tokens) == ("length", 512)


def test_variants_answer_differently(client: openai.OpenAI) -> None:
    texts = [
        client.completions.create(model=m, prompt=PROMPT, max_tokens=12, temperature=0).choices[0].text
        for m in NAMES[:3]
    ]
    assert len(set(texts)) == 3


def test_log_probabilities_are_answered(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="forte", messages=CHAT, max_tokens=4, temperature=0, logprobs=True, top_logprobs=3
    )
    assert answer.choices[0].logprobs is not None
    tokens = answer.choices[0].logprobs.content
    assert tokens is not None
    assert len(tokens) == 4
    for token in tokens:
        assert len(token.top_logprobs) == 3
        assert token.logprob == max(t.logprob for t in token.top_logprobs) <= 0


def test_a_seed_makes_sampling_repeatable(client: openai.OpenAI) -> None:
    def sample(seed: int) -> str:
        answer = client.completions.create(
            model="forte", prompt="Once upon a time", max_tokens=16, temperature=1.0, seed=seed
        )
        return answer.choices[0].text

    assert sample(1) == sample(1)
    assert len({sample(seed) for seed in range(1, 5)}) > 1


def test_several_choices_are_answered(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model=BASE, messages=CHAT, max_tokens=4, n=3, temperature=1)
    assert sorted(c.index for c in answer.choices) == [0, 1, 2]


def test_served_models_are_listed(client: openai.OpenAI) -> None:
    cards = {card.id: card.model_dump() for card in client.models.list()}
    assert {"smol", "forte", "piano"} <= set(cards)
    assert cards["smol"]["parent"] is None
    assert cards["forte"]["parent"] == cards["piano"]["parent"] == "smol"
    assert client.models.retrieve("forte").id == "forte"


def test_an_unknown_model_is_not_found(client: openai.OpenAI) -> None:
    for name in ("nobody", "smol:nobody", "forte:smol", "piano:forte"):
        with pytest.raises(openai.NotFoundError) as caught:
            client.chat.completions.create(model=name, messages=CHAT)
        assert caught.value.code == "model_not_found"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("nobody")


def test_too_long_a_prompt_is_a_bad_request(client: openai.OpenAI) -> None:
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError) as caught:
            client.completions.create(model="forte", prompt="word " * 9000, max_tokens=4, stream=stream)
        assert caught.value.code == "context_length_exceeded"
        assert "8192" in caught.value.message


@pytest.mark.parametrize(
    ("options", "hint"),
    [
        ({"temperature": -1}, "temperature"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"top_p": 2}, "top_p"),
        ({"messages": []}, ""),
        ({"messages": "hello"}, "messages"),
    ],
)
def test_a_nonsensical_body_is_a_bad_request(
    client: openai.OpenAI, options: dict[str, Any], hint: str
) -> None:
    usual: dict[str, Any] = {"model": BASE, "messages": CHAT, "max_tokens": 4}
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**(usual | options))
    assert hint in caught.value.message
    assert caught.value.type == "invalid_request_error"
    assert caught.value.code == "invalid_request"


def test_langchain_is_answered(cluster: Cluster) -> None:
    from langchain_openai import ChatOpenAI  # its import takes as long as many tests

    llm = ChatOpenAI(
        base_url=f"{cluster.url}/v1", api_key="unused", model="smol:forte", max_tokens=8, temperature=0
    )
    answer = llm.invoke("What is the capital of France?")
    assert answer.content
    assert answer.usage_metadata is not None
    assert answer.usage_metadata["output_tokens"] <= 8
    chunks = list(llm.stream("What is the capital of France?"))
    assert "".join(str(chunk.content) for chunk in chunks) == answer.content


def test_inference_model_is_answered(cluster: Cluster) -> None:
    body = {"model": "smol:piano", "inputText": PROMPT, "maxOutputLength": 8, "temperature": 0}
    for form in ("raw", "chat"):
        reply = cluster.http.post("/inference_model", json={**body, "format": form})
        assert reply.status_code == 200, reply.text
        answer = reply.json()
        assert answer["model"] == "smol:piano"
        assert answer["outputText"]
        assert 0 < answer["outputTokens"] <= 8
        assert answer["inputTokens"] > 0


def test_vllm_s_adapter_calls_work(
    cluster: Cluster, client: openai.OpenAI, adapters: dict[str, Path]
) -> None:
    started = time.monotonic()
    loaded = cluster.http.post(
        "/v1/load_lora_adapter", json={"lora_name": "spare", "lora_path": str(adapters["spare"])}
    )
    assert loaded.status_code == 200, loaded.text
    print(f"\nload_lora_adapter: {time.monotonic() - started:.2f} s")
    again = cluster.http.post(
        "/v1/load_lora_adapter", json={"lora_name": "spare", "lora_path": str(adapters["spare"])}
    )
    assert again.status_code == 409
    texts = {
        m: client.completions.create(model=m, prompt=PROMPT, max_tokens=12, temperature=0).choices[0].text
        for m in (BASE, "spare")
    }
    assert texts[BASE] != texts["spare"]
    unloaded = cluster.http.post("/v1/unload_lora_adapter", json={"lora_name": "spare"})
    assert unloaded.status_code == 200, unloaded.text
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="spare", prompt=PROMPT, max_tokens=1)
    gone = cluster.http.post("/v1/unload_lora_adapter", json={"lora_name": "spare"})
    assert gone.status_code == 404


def test_a_lost_stream_frees_its_slot(cluster: Cluster, client: openai.OpenAI) -> None:
    """The engine does not make the tokens that the client no longer reads."""
    before = cluster.engine_metric("vllm:generation_tokens_total", BASE)
    stream = client.completions.create(
        model="forte",
        prompt=PROMPT,
        max_tokens=480,
        temperature=0,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    for _ in range(5):
        next(iter(stream))
    assert cluster.engine_metric("vllm:num_requests_running", BASE) == 1
    stream.close()
    _wait_idle(cluster)
    tokens = cluster.engine_metric("vllm:generation_tokens_total", BASE) - before
    assert 5 <= tokens < 480


def test_a_lost_whole_request_frees_its_slot(cluster: Cluster) -> None:
    """The client closes its connection once the engine has made some of the tokens."""
    answers, where = 8, urlsplit(cluster.url)
    body = json.dumps(
        {"model": BASE, "prompt": PROMPT, "max_tokens": 480, "n": answers, "ignore_eos": True}
    ).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: {where.netloc}\r\ncontent-length: {len(body)}\r\n"

    def made() -> float:
        return cluster.engine_metric("vllm:generation_tokens_total", BASE) - before

    before = cluster.engine_metric("vllm:generation_tokens_total", BASE)
    with socket.create_connection((where.hostname, where.port)) as connection:
        connection.sendall(f"{head}content-type: application/json\r\n\r\n".encode() + body)
        until(lambda: made() > 0, "the engine to make tokens", every_s=0.02)
    _wait_idle(cluster)
    assert made() < 480 * answers


def _wait_idle(cluster: Cluster) -> None:
    until(
        lambda: cluster.engine_metric("vllm:num_requests_running", BASE) == 0,
        "the engine to be idle",
        every_s=0.05,
    )
