"""One engine, and variants with words of their own: each answers with its folder's, no request ends it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from transformers import AutoTokenizer

from profiler.checkpoint import read_model
from profiler.plans import candidate_plans
from testkit import random_adapters, started_worker
from testkit.engine_configs import ranks_of, vllm_config
from testkit.random_adapters import RandomLora
from testkit.tiny_families import Tiny
from tests.workers.test_families import GROUPED
from workers.group.grammar_process import NAME
from workers.messages import EngineCall, EngineConfig, EngineReply, VariantRef

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

ROWS = 64
WORDS = {f"w{i}": i for i in range(58)}  # ids up to 63 have rows, and no words
PAD = {"[PAD]": ROWS}  # a word without a row
THINK = {"<think>": 60}  # a token that a variant adds, in a row of the base's padding
PROMPT = [5, 17, 33, 8, 9, 10, 44, 3, 7, 51, 12, 13]
TEMPLATE = "{% for m in messages %}w7 {{ m['content'] }} w8 {% endfor %}{% if tools %}w9{% endif %}"
ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
HUGE = "{{ 'w5 ' * 2000000000 }}"


def tokenizer_of(words: dict[str, int], added: dict[str, int], folder: Path, **settings: Any) -> None:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    document = {
        "version": "1.0",
        "added_tokens": [{"id": i, "content": t, **flags, "special": False} for t, i in added.items()],
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "model": {"type": "WordLevel", "vocab": {**words, **added}, "unk_token": "w2"},
    }
    (folder / "tokenizer.json").write_text(json.dumps(document))
    named = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "w2", "eos_token": "w1", **settings}
    (folder / "tokenizer_config.json").write_text(json.dumps(named))


def base_of(folder: Path) -> Path:
    torch.manual_seed(1)
    Tiny("Llama", {**GROUPED, "vocab_size": ROWS}).write(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    tokenizer_of({**WORDS, **PAD}, {}, folder)
    return folder


def config_of(folder: Path) -> EngineConfig:
    (plan,) = candidate_plans(read_model(folder), ("none",), 1, 128, 4, max_variants=2, max_lora_rank=8)
    return vllm_config(
        folder,
        ranks_of(plan.layers_per_stage, 1, variant_memory_bytes=32 << 20),
        max_model_len=plan.max_model_len,
        max_variants=plan.max_variants,
        max_lora_rank=plan.max_lora_rank,
    )


@dataclass
class Lab(started_worker.Lab):
    folder: Path
    made: int = 0

    def ask(self, body: dict[str, Any], variant: VariantRef | None = None) -> EngineReply:
        named = {"model": variant.name if variant else "base", **body}
        path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
        reply: EngineReply = self.run(self.worker.call(EngineCall(path, json.dumps(named).encode(), variant)))
        return reply

    def choice(self, body: dict[str, Any], variant: VariantRef | None = None) -> dict[str, Any]:
        reply = self.ask({"return_token_ids": True, **body}, variant)
        assert reply.status == 200, reply.body
        answer: dict[str, Any] = json.loads(reply.body)
        return {**answer, **answer["choices"][0]}

    def variant(self, **files: str) -> VariantRef:
        """The one LoRA, with these additional files (`__` is a dot in their names)."""
        self.made += 1
        folder = self.folder / f"variant-{self.made}"
        shutil.copytree(self.folder / "lora", folder)
        for name, text in files.items():
            (folder / name.replace("__", ".")).write_text(text)
        return VariantRef(f"v{self.made}", self.made, str(folder))

    @property
    def base_answers(self) -> bool:
        return self.ask({"prompt": PROMPT, "max_tokens": 2}).status == 200


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    folder = tmp_path_factory.mktemp("words")
    base = base_of(folder / "base")
    random_adapters.write(base, folder / "lora", RandomLora("lora", 4, 1))
    with started_worker.started(config_of(base), started_worker.ONE_THREAD) as (worker, loop):
        yield Lab(worker, loop, folder)


GREEDY = {"prompt": PROMPT, "max_tokens": 8, "temperature": 0}


def test_a_token_without_a_row_is_refused_and_the_engine_goes_on(lab: Lab) -> None:
    for body in ({"prompt": "w5 [PAD] w6"}, {"prompt": "w5", "bad_words": ["[PAD]"]}):
        reply = lab.ask({**body, "max_tokens": 2})
        assert (reply.status, b"'[PAD]'" in reply.body) == (400, True), reply.body
    streamed = lab.ask({"prompt": "w5 [PAD]", "max_tokens": 2, "stream": True})
    assert b"[PAD]" in streamed.body
    assert b"is outside the model's vocabulary" in streamed.body
    assert lab.base_answers


def test_rows_without_words_are_answered(lab: Lab) -> None:
    body = {"prompt": [5, 62, 7], "max_tokens": 2, "prompt_logprobs": 3, "logprobs": 3}
    assert lab.choice(body)["finish_reason"] == "length"
    assert lab.choice({"prompt": "w5", "max_tokens": 2, "allowed_token_ids": [61]})["text"] == ""


def test_a_chat_has_the_variants_own_template(lab: Lab) -> None:
    messages = [{"role": "user", "content": "w5 w6"}]
    body = {"messages": messages, "max_tokens": 2, "temperature": 0}
    without = lab.variant()
    for who in (None, without):
        refused = lab.ask(body, who)
        assert (refused.status, b"chat template" in refused.body) == (400, True)
    own = lab.variant(chat_template__jinja=TEMPLATE)
    answer = lab.choice(body, own)
    tokenizer = AutoTokenizer.from_pretrained(lab.folder / "base")
    text = tokenizer.apply_chat_template(messages, chat_template=TEMPLATE, tokenize=False)
    assert answer["prompt_token_ids"] == tokenizer.encode(text) == [7, 5, 6, 8]
    plain = lab.choice({"prompt": [7, 5, 6, 8], "max_tokens": 2, "temperature": 0}, own)
    assert answer["token_ids"] == plain["token_ids"], "the variant's weights answer"
    old = lab.variant(tokenizer_config__json=json.dumps({"chat_template": "w9", "unk_token": "w2"}))
    assert lab.choice(body, old)["prompt_token_ids"] == [9]
    assert lab.ask(body).status == 400, "the base has none still"


def test_an_answer_ends_at_the_variant_s_own_end_tokens(lab: Lab) -> None:
    plain = lab.choice(GREEDY, lab.variant())
    assert plain["finish_reason"] == "length"
    tokens = plain["token_ids"]
    at = next(i for i in range(1, 8) if tokens.index(tokens[i]) == i)
    end = tokens[at]
    generation = lab.variant(generation_config__json=json.dumps({"eos_token_id": [end, 63]}))
    settings = {"eos_token": f"w{end}", "unk_token": "w2"}
    by_token = lab.variant(tokenizer_config__json=json.dumps(settings))
    config = json.loads((lab.folder / "base" / "config.json").read_text())
    configured = lab.variant(config__json=json.dumps({**config, "eos_token_id": [end, 63]}))
    cases = [generation, configured] if end > 57 else [generation, configured, by_token]
    for variant in cases:
        answer = lab.choice(GREEDY, variant)
        assert (answer["token_ids"], answer["finish_reason"]) == (tokens[: at + 1], "stop")
        ignoring = lab.choice({**GREEDY, "ignore_eos": True}, variant)
        assert (ignoring["token_ids"], ignoring["finish_reason"]) == (tokens, "length")
    assert lab.choice(GREEDY, lab.variant())["token_ids"] == tokens


def test_generation_defaults_are_the_variants(lab: Lab) -> None:
    """temperature 0.01 makes an answer that says no temperature the greedy one."""
    expected = lab.choice(GREEDY, lab.variant())["token_ids"]
    defaults = {"temperature": 0.0001, "do_sample": True, "max_new_tokens": 3}
    own = lab.variant(generation_config__json=json.dumps(defaults))
    answer = lab.choice({"prompt": PROMPT, "max_tokens": 8}, own)
    assert answer["token_ids"] == expected[: len(answer["token_ids"])]
    assert len(lab.choice({"prompt": PROMPT}, own)["token_ids"]) == 3


def test_added_tokens_are_the_variants(lab: Lab) -> None:
    made = lab.folder / "tokens"
    made.mkdir()
    tokenizer_of({**WORDS, **PAD}, THINK, made, eos_token="w1")
    files = {
        n.replace(".", "__"): (made / n).read_text() for n in ("tokenizer.json", "tokenizer_config.json")
    }
    own = lab.variant(**files)
    body = {"prompt": "w5 <think> w6", "max_tokens": 2, "allowed_token_ids": [60]}
    answer = lab.choice(body, own)
    assert (answer["prompt_token_ids"], answer["text"].strip()) == ([5, 60, 6], "<think> <think>")
    base = lab.choice(body)
    assert (base["prompt_token_ids"], base["text"]) == ([5, 2, 6], ""), "the base has no such token"
    assert lab.ask({"prompt": "[PAD]", "max_tokens": 1}, own).status == 400
    assert lab.base_answers


@pytest.mark.parametrize("template", [ENDLESS, HUGE])
def test_a_template_that_would_not_end_ends_its_request(lab: Lab, template: str) -> None:
    own = lab.variant(chat_template__jinja=template)
    body = {"messages": [{"role": "user", "content": "w5"}], "max_tokens": 2}
    reply = lab.ask(body, own)
    assert reply.status == 400, reply.body
    assert b"more than 5 s of CPU time" in reply.body or b"code and constants have more than" in reply.body
    assert lab.base_answers


@pytest.mark.parametrize(
    ("template", "said"),
    [
        (ENDLESS, b"more than 5 s of CPU time"),
        ("{% for _ in range(10**9) %}{% endfor %}", b"Range too big"),
        ("{% set n = 999 %}{{ 'w5 ' * (n * 2000000) }}", b"512 MiB"),
    ],
)
def test_the_bases_own_template_is_bounded_too(lab: Lab, template: str, said: bytes) -> None:
    tokenizer = lab.worker._engine._llm.renderer.tokenizer  # type: ignore[union-attr]
    tokenizer.chat_template = template
    try:
        reply = lab.ask({"messages": [{"role": "user", "content": "w5"}], "max_tokens": 2})
    finally:
        tokenizer.chat_template = None
    assert (reply.status, said in reply.body) == (400, True), reply.body
    assert lab.base_answers


def test_a_chat_that_takes_long_to_render_delays_no_other_tenants_chat(lab: Lab) -> None:
    own = lab.variant(chat_template__jinja="{% if messages[0].content == 'w9' %}" + ENDLESS + "{% endif %}w5")

    async def chat(word: str, tenant: str) -> EngineReply:
        body = {"model": own.name, "messages": [{"role": "user", "content": word}], "max_tokens": 2}
        raw = json.dumps({**body, "cache_salt": f"{tenant}:"}).encode()
        reply: EngineReply = await lab.worker.call(EngineCall("/v1/chat/completions", raw, own))
        return reply

    async def together() -> list[EngineReply]:
        assert (await chat("w5", "b")).status == 200, "the variant is loaded"
        slow = [asyncio.create_task(chat("w9", "a")) for _ in range(2)]
        quick = await chat("w5", "b")  # after them in every queue
        assert not any(task.done() for task in slow)
        return [quick, *await asyncio.gather(*slow)]

    quick, *slow = lab.run(together())
    assert quick.status == 200, quick.body
    assert [b"more than 5 s of CPU time" in reply.body for reply in slow] == [True, True]


def test_a_template_that_takes_content_in_parts_gets_parts(lab: Lab) -> None:
    """vLLM finds that out from the template, and else gives it a text."""
    parts = "{% for m in messages %}{% for part in m['content'] %}{{ part['text'] }} w8 {% endfor %}"
    parts += "{% endfor %}"
    own = lab.variant(chat_template__jinja=parts)
    body = {"messages": [{"role": "user", "content": "w5 w6"}], "max_tokens": 2}
    assert lab.choice(body, own)["prompt_token_ids"] == [5, 6, 8]


def test_a_reasoning_variant_is_read_so_though_its_base_does_not_reason(lab: Lab) -> None:
    """No text that a grammar forces is reasoning: the engine's core applies the grammar from the first
    token."""
    made = lab.folder / "reasons"
    made.mkdir()
    tokenizer_of({**WORDS, **PAD}, {"<think>": 60, "</think>": 61}, made, eos_token="w1")
    own = lab.variant(
        tokenizer__json=(made / "tokenizer.json").read_text(),
        tokenizer_config__json=(made / "tokenizer_config.json").read_text(),
        chat_template__jinja="{{ messages[0].content }}{% if add_generation_prompt %} <think>{% endif %}",
    )
    body = {"messages": [{"role": "user", "content": "w5 w6"}], "max_tokens": 2, "allowed_token_ids": [7]}
    message = lab.choice(body, own)["message"]
    assert (message["content"], message["reasoning"].split()) == (None, ["w7", "w7"])
    forced = {**body, "allowed_token_ids": None, "structured_outputs": {"choice": ["w9"]}}
    message = lab.choice(forced, own)["message"]
    assert (message["content"].strip(), message.get("reasoning")) == ("w9", None)


def test_a_tokenizer_that_is_none_is_refused_when_the_variant_is_loaded(lab: Lab) -> None:
    own = lab.variant(tokenizer__json="version https://git-lfs.github.com/spec/v1")
    reply = lab.ask(GREEDY, own)
    assert reply.status in (400, 422), reply.body
    assert b"tokenizer" in reply.body
    assert lab.base_answers


# --- grammars ----------------------------------------------------------------------------------------------

TWO_WORDS = {"structured_outputs": {"regex": "w5(w6|w7)"}, "max_tokens": 8}


def grammar_process() -> psutil.Process:
    """The process that compiles grammars first: the engine's core forked it, or it is a program."""
    named = [p for p in psutil.Process().children(recursive=True) if p.name() == NAME.decode()]
    (process,) = [p for p in named if p.parent() not in named]
    return process


@pytest.mark.parametrize("stream", [False, True])
def test_a_grammars_answer_ends_with_the_variants_own_end(lab: Lab, stream: bool) -> None:
    """Its text has neither the variant's end nor the base's."""
    ends = (
        {"tokenizer_config__json": json.dumps({"eos_token": "w9", "unk_token": "w2"})},
        {"generation_config__json": json.dumps({"eos_token_id": [9, 63]})},
    )
    for variant in (None, *(lab.variant(**files) for files in ends)):
        if not stream:
            answer = lab.choice({"prompt": PROMPT, **TWO_WORDS}, variant)
            assert answer["text"].split() in (["w5", "w6"], ["w5", "w7"])
            assert answer["finish_reason"] == "stop"
            continue
        reply = lab.ask({"prompt": PROMPT, **TWO_WORDS, "stream": True}, variant)
        events = [json.loads(line[6:]) for line in reply.body.split(b"\n\n") if line.startswith(b"data: {")]
        choices = [event["choices"][0] for event in events if event["choices"]]
        text = "".join(choice["text"] for choice in choices)
        assert text.split() in (["w5", "w6"], ["w5", "w7"])
        assert choices[-1]["finish_reason"] == "stop"


def test_a_variant_may_end_an_open_grammar_with_its_own_end(lab: Lab) -> None:
    """The mask allows it where the grammar may end; the bias has the model say it there."""
    own = lab.variant(generation_config__json=json.dumps({"eos_token_id": [9, 63]}))
    body = {"prompt": PROMPT, "structured_outputs": {"regex": "w5(w6|w7)*"}, "max_tokens": 8}
    answer = lab.choice({**body, "logit_bias": {"9": 100}}, own)
    assert (answer["token_ids"], answer["finish_reason"]) == ([5, 9], "stop")
    assert answer["text"].split() == ["w5"]


def test_the_process_that_compiles_grammars_starts_again(lab: Lab) -> None:
    for word in ("w10", "w11"):
        with contextlib.suppress(ValueError):
            grammar_process().kill()
        words = {"structured_outputs": {"regex": f"w5{word}"}, "max_tokens": 8}
        assert lab.choice({"prompt": PROMPT, **words})["text"].split() == ["w5", word]
    assert lab.base_answers
