"""Base and variants in one batch give what each gives alone, and what merged weights give."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from prometheus_client import REGISTRY

from testkit import random_adapters, started_worker
from testkit.engine_configs import ranks_of, vllm_config
from testkit.random_adapters import ATTENTION, RandomLora
from workers import request_headers
from workers.engine.vllm_engine import VllmEngine
from workers.messages import EngineCall, EngineConfig, EngineHead, VariantRef
from workers.tiers import Tier

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

# Ostinato is on the path without being installed.
NOT_INSTALLED = {"VLLM_PLUGINS": "others"}
BASE = "base"
TOKENS = 24
# Two answers may differ where the reference itself is undecided.
TIE = 1e-4
LOGPROB_TOLERANCE = 2e-3
PROMPTS = (
    "The capital of France is",
    "Once upon a time, in a village by the sea, there lived an old fisherman who",
    "def fibonacci(n):\n    ",
)
# Two slots: none is empty in the batch, so a row that reads the last slot by mistake reads a variant.
LORAS = (RandomLora("small", rank=4, seed=1), RandomLora("large", rank=16, seed=2))
THIRD = RandomLora("third", rank=8, seed=3, modules=ATTENTION, strength=0.25)


@dataclass(frozen=True)
class Answer:
    prompt: list[int]
    tokens: list[int]
    logprobs: list[float]
    text: str


@dataclass
class Lab(started_worker.Lab):
    variants: dict[str, VariantRef]
    references: dict[str, Any]

    async def ask(self, model: str, prompt: str, wait_s: float = 0) -> Answer:
        await asyncio.sleep(wait_s)
        reply = await self.worker.call(self.request(model, prompt))
        assert reply.status == 200, reply.body
        choice = json.loads(reply.body)["choices"][0]
        return Answer(
            choice["prompt_token_ids"],
            choice["token_ids"],
            choice["logprobs"]["token_logprobs"],
            choice["text"],
        )

    def request(self, model: str, prompt: str, **options: Any) -> EngineCall:
        salt = uuid.uuid4().hex  # no answer may come from another's KV blocks
        usual = {"max_tokens": TOKENS, "logprobs": 1, "cache_salt": salt}
        return started_worker.greedy(model, prompt, self.variants.get(model), **{**usual, **options})

    async def ask_all(self, rows: list[tuple[str, str]], stagger_s: float = 0) -> list[Answer]:
        asked = [self.ask(model, prompt, i * stagger_s) for i, (model, prompt) in enumerate(rows)]
        return list(await asyncio.gather(*asked))

    def expected(self, model: str, answer: Answer) -> torch.Tensor:
        """The log-probabilities of merged weights in transformers at each position of the answer."""
        return random_adapters.log_probabilities(self.references[model], answer.prompt, answer.tokens)


@pytest.fixture(scope="module")
def lab(smollm2_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    folder = tmp_path_factory.mktemp("batch")
    base = smollm2_folder
    variants = {
        lora.name: VariantRef(lora.name, uid, str(random_adapters.write(base, folder / lora.name, lora)))
        for uid, lora in enumerate((*LORAS, THIRD), 1)
    }
    references = {BASE: random_adapters.merged_model(base, None)} | {
        name: random_adapters.merged_model(base, Path(variant.path)) for name, variant in variants.items()
    }
    begun = time.monotonic()
    with started_worker.started(_config(base), NOT_INSTALLED) as (worker, loop):
        print(f"\nengine start: {time.monotonic() - begun:.1f} s")
        yield Lab(worker, loop, variants, references)


def _config(base: Path) -> EngineConfig:
    return vllm_config(
        base,
        ranks_of((30,), kv_cache_bytes=1 << 30, memory_bytes=2 << 30, variant_memory_bytes=64 << 20),
        max_model_len=512,
        max_num_seqs=16,
        max_variants=len(LORAS),
        variant_host_bytes=1 << 30,
    )


def _steps() -> float:
    """Scheduler steps the engine has reported so far."""
    for metric in REGISTRY.collect():
        for sample in metric.samples:
            if sample.name == "vllm:iteration_tokens_total_count":
                return sample.value
    raise AssertionError("the engine reports no vllm:iteration_tokens_total")


def _assert_same(one: Answer, other: Answer, expected: torch.Tensor) -> None:
    """Token for token; at an exact tie of the reference they may part, and what follows says nothing."""
    for i, (a, b) in enumerate(zip(one.tokens, other.tokens, strict=True)):
        if a != b:
            assert abs(expected[i, a] - expected[i, b]) < TIE, f"position {i}: {one.text!r} / {other.text!r}"
            return


def _assert_greedy(answer: Answer, expected: torch.Tensor) -> float:
    """Each token is the reference's best (or within a tie of it). Returns max |delta log-probability|."""
    chosen = expected[torch.arange(len(answer.tokens)), torch.tensor(answer.tokens)]
    gap = expected.max(dim=-1).values - chosen
    assert gap.max() < TIE, f"position {int(gap.argmax())} is worse by {gap.max():.4f}: {answer.text!r}"
    difference = float((chosen - torch.tensor(answer.logprobs)).abs().max())
    assert difference < LOGPROB_TOLERANCE
    return difference


def _rows(models: tuple[str, ...]) -> list[tuple[str, str]]:
    return [(model, prompt) for prompt in PROMPTS for model in models]


MIXED = _rows((BASE, *(lora.name for lora in LORAS)))


@pytest.fixture(scope="module")
def mixed(lab: Lab) -> list[Answer]:
    """Three models times three prompts, sent at once; they must really have shared batches."""
    for lora in LORAS:
        lab.run(lab.worker.load_variant(lab.variants[lora.name]))
    lab.run(lab.ask_all(MIXED[:1]))
    steps, started = _steps(), time.monotonic()
    answers: list[Answer] = lab.run(lab.ask_all(MIXED))
    took_s, steps = time.monotonic() - started, _steps() - steps
    print(f"\n{len(MIXED)} requests of {TOKENS} tokens in {steps:.0f} steps, {took_s:.1f} s")
    assert steps < 2 * TOKENS, "the requests did not share batches"
    return answers


def test_mixed_batch_equals_merged_weights(lab: Lab, mixed: list[Answer]) -> None:
    for model in (BASE, *(lora.name for lora in LORAS)):
        worst = 0.0
        for (asked, _), answer in zip(MIXED, mixed, strict=True):
            if asked == model:
                assert len(answer.tokens) == TOKENS
                worst = max(worst, _assert_greedy(answer, lab.expected(model, answer)))
        print(f"{model}: largest |delta log-probability| to merged float32 weights: {worst:.1e}")


def test_mixed_batch_equals_each_alone(lab: Lab, mixed: list[Answer]) -> None:
    """Each model and each prompt once; that all of them are right, the test above says."""
    width = 1 + len(LORAS)
    for number in range(width):
        (model, prompt), answer = MIXED[number * width + number], mixed[number * width + number]
        alone = lab.run(lab.ask(model, prompt))
        _assert_same(alone, answer, lab.expected(model, answer))


def test_the_variants_differ_from_the_base_and_each_other(mixed: list[Answer]) -> None:
    """Otherwise the tests above would show nothing."""
    width = 1 + len(LORAS)
    for i, prompt in enumerate(PROMPTS):
        texts = [answer.text for answer in mixed[i * width : (i + 1) * width]]
        print(f"\n{prompt!r}:", *map(repr, texts), sep="\n  ")
        assert len(set(texts)) == width
    for answer in mixed:
        assert len(set(answer.tokens)) > 4, f"hardly text: {answer.text!r}"


def test_requests_that_arrive_while_others_decode_are_answered(lab: Lab) -> None:
    """Prefills and decodes of different models in the same steps."""
    rows = list(reversed(MIXED))
    for (model, _), answer in zip(rows, lab.run(lab.ask_all(rows, stagger_s=0.15)), strict=True):
        _assert_greedy(answer, lab.expected(model, answer))


def test_more_variants_than_slots_are_served(lab: Lab) -> None:
    """Three variants take turns in two slots next to the base."""
    rows = _rows((BASE, THIRD.name, *(lora.name for lora in LORAS)))
    for (model, _), answer in zip(rows, lab.run(lab.ask_all(rows)), strict=True):
        _assert_greedy(answer, lab.expected(model, answer))


def test_reloading_a_name_with_other_weights(lab: Lab) -> None:
    """The same name with a new uid is the new variant, for the very next request."""
    old, new = lab.variants[LORAS[0].name], lab.variants[THIRD.name]
    renamed = VariantRef(old.name, 99, new.path)
    lab.run(lab.worker.load_variant(renamed))
    lab.variants[old.name] = renamed
    try:
        answer = lab.run(lab.ask(old.name, PROMPTS[0]))
        _assert_greedy(answer, lab.expected(THIRD.name, answer))
    finally:
        lab.variants[old.name] = old
        lab.run(lab.worker.load_variant(old))
    answer = lab.run(lab.ask(old.name, PROMPTS[0]))
    _assert_greedy(answer, lab.expected(old.name, answer))


@pytest.mark.parametrize("stream", [False, True])
def test_a_damaged_variant_that_is_read_again_names_its_defect(lab: Lab, stream: bool) -> None:
    """It lost its place in memory since it was loaded. The others of the batch do not feel it."""
    variant = lab.variants[THIRD.name]
    path = Path(variant.path) / "adapter_model.safetensors"
    lab.run(lab.worker.load_variant(variant))
    engine = lab.worker.engine
    assert isinstance(engine, VllmEngine)
    lab.run(engine._client.forget(variant.uid))  # as if others had taken its place
    sound = path.read_bytes()
    path.write_bytes(sound[:-4])
    call = lab.request(THIRD.name, PROMPTS[0], stream=stream)

    async def ask_together() -> tuple[list[Any], Answer]:
        asked = asyncio.ensure_future(lab.ask(LORAS[0].name, PROMPTS[1]))
        items = [item async for item in lab.worker.stream(call)]
        return items, await asked

    try:
        items, beside = lab.run(ask_together())
    finally:
        path.write_bytes(sound)
    body = b"".join(item for item in items[1:] if isinstance(item, bytes))
    error = json.loads(body.removeprefix(b"data: ").partition(b"\n")[0])["error"]
    assert items[0].status == (200 if stream else 400)
    assert error["code"] == "source_unreadable"
    assert f"{path} is truncated" in error["message"]
    _assert_greedy(beside, lab.expected(LORAS[0].name, beside))
    answer = lab.run(lab.ask(THIRD.name, PROMPTS[0]))  # the file is mended
    _assert_greedy(answer, lab.expected(THIRD.name, answer))


def test_a_closed_stream_frees_its_slot(lab: Lab) -> None:
    async def read_a_little() -> int:
        stream = lab.worker.stream(lab.request(BASE, PROMPTS[0], stream=True, max_tokens=400))
        async with contextlib.aclosing(stream) as items:
            seen = 0
            async for item in items:
                seen += not isinstance(item, EngineHead)
                if seen == 3:
                    break
        return seen

    assert lab.run(read_a_little()) == 3
    started, steps = time.monotonic(), _steps()
    while _running() > 0:
        assert _steps() - steps < 200, "the slot is still taken"
        time.sleep(0.1)
    print(f"\nslot free {time.monotonic() - started:.2f} s after the stream was closed")


def _running() -> float:
    value = REGISTRY.get_sample_value("vllm:num_requests_running", {"engine": "0", "model_name": BASE})
    assert value is not None
    return value


def test_requests_about_the_path_are_answered_without_the_core(lab: Lab) -> None:
    """One token of 24, by vLLM's own application; others, and all once it is over, are answered as ever."""

    async def generated(request_id: str) -> int:
        request = lab.request(BASE, PROMPTS[0], request_id=request_id, logprobs=None)
        reply = await lab.worker.call(request)
        assert reply.status == 200, reply.body
        answer = json.loads(reply.body)
        assert answer["usage"]["prompt_tokens"] == len(answer["choices"][0]["prompt_token_ids"])
        return int(answer["usage"]["completion_tokens"])

    async def all_at_once() -> list[int]:
        asked = [generated("of the-marker-1"), generated("of a user"), generated("of the-marker-2")]
        return list(await asyncio.gather(*asked))

    lab.run(lab.worker.answer_at_once("the-marker"))
    try:
        assert lab.run(all_at_once()) == [1, TOKENS, 1]
    finally:
        lab.run(lab.worker.answer_at_once(""))
    assert lab.run(all_at_once()) == [TOKENS] * 3


@pytest.mark.parametrize("known", [False, True])
def test_a_variant_is_read_ahead_of_its_request(lab: Lab, known: bool) -> None:
    """`known`: it was asked before, and lost its place in host memory since."""
    uid = 10 + known
    variant = VariantRef(f"wanted{uid}", uid, lab.variants[THIRD.name].path)
    lab.variants[variant.name] = variant
    if known:
        lab.run(lab.ask(variant.name, PROMPTS[0]))
        engine = lab.worker.engine
        assert isinstance(engine, VllmEngine)
        lab.run(engine._client.forget(uid))
        lab.run(_until(lab, uid, None))
    wanted = EngineCall(request_headers.WANTED_PATH, b"", variant)
    assert lab.run(lab.worker.call(wanted)).status == 202
    lab.run(_until(lab, uid, Tier.HOST))
    lab.references[variant.name] = lab.references[THIRD.name]
    answer = lab.run(lab.ask(variant.name, PROMPTS[0]))
    expected = lab.expected(variant.name, answer)
    chosen = expected[torch.arange(TOKENS), torch.tensor(answer.tokens)]
    assert float((chosen - torch.tensor(answer.logprobs)).abs().max()) < LOGPROB_TOLERANCE


async def _until(lab: Lab, uid: int, tier: Tier | None) -> None:
    """A variant is there; None: the engine does not know it any more."""
    async with asyncio.timeout(120):
        while tier != next((v.tier for v in (await lab.worker.residency()).variants if v.uid == uid), None):  # noqa: ASYNC110
            await asyncio.sleep(0.05)
