"""Requests of two variants that have one name, at the same time: each is answered by the one it asked for.

vLLM's application is replaced by what it does with its table of adapters; it waits before and in between, as
vLLM does while it reads a body and renders a prompt.
"""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from workers.bus.client import VariantClient
from workers.engine.own_applications import OwnApplications
from workers.engine.step_observer import StepObserver
from workers.engine.template_process import Templates
from workers.engine.variant_table import VariantTable
from workers.engine.vllm_engine import VllmEngine
from workers.group.launch import Launch
from workers.messages import VariantRef

OLD, NEW = VariantRef("mine", 7, "/a"), VariantRef("mine", 8, "/b")
OTHER = VariantRef("other", 9, "/c")


class Application:
    """Answers with the uid of the adapter that it would have run; 0 for none."""

    def __init__(self) -> None:
        self.state = SimpleNamespace(openai_serving_models=SimpleNamespace(lora_requests={}))

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await asyncio.create_task(self._answer(scope["model"], scope["pauses"], send))  # as middleware may

    async def _answer(self, model: str, pauses: int, send: Any) -> None:
        for _ in range(pauses):
            await asyncio.sleep(0)
        models = self.state.openai_serving_models
        if model not in models.lora_requests:
            await send(0)
            return
        await send(models.lora_requests[model].lora_int_id)


class Client:
    """The scheduler's, which takes its time to read a variant."""

    def __init__(self) -> None:
        self.forgotten: list[int] = []
        self.prepared: list[int] = []

    async def prepare(self, uid: int, path: str) -> None:
        await asyncio.sleep(0)
        self.prepared.append(uid)

    async def forget(self, uid: int) -> None:
        self.forgotten.append(uid)


@pytest.fixture
def client() -> Client:
    return Client()


@pytest.fixture
def engine(client: Client) -> VllmEngine:
    llm = SimpleNamespace(engine_core=SimpleNamespace(add_request_async=None))
    launch = cast(Launch, None)
    nowhere, no_more = Path("/nowhere"), cast(Any, None)  # these variants bring weights alone
    applications = OwnApplications(Application(), llm, nowhere, nowhere, (), no_more, Templates())
    return VllmEngine(llm, applications, "0", cast(VariantClient, client), launch, (), StepObserver())


async def asked(engine: VllmEngine, variant: VariantRef, pauses: int = 0) -> int:
    """The uid that answers in a worker's request."""
    answers: list[int] = []

    async def send(answer: int) -> None:
        answers.append(answer)

    await engine.ensure_variant(variant)
    for _ in range(pauses % 3):
        await asyncio.sleep(0)
    await engine.answer(variant, {"model": variant.name, "pauses": pauses}, None, send)
    (answer,) = answers
    return answer


async def test_a_lagging_gateway_and_a_quick_one_each_get_their_own(engine: VllmEngine) -> None:
    chosen = random.Random(0)
    requests = [(chosen.choice((OLD, NEW, OTHER)), chosen.randrange(9)) for _ in range(800)]
    answers = await asyncio.gather(*(asked(engine, variant, pauses) for variant, pauses in requests))
    assert answers == [variant.uid for variant, _ in requests]


async def test_each_is_read_once(engine: VllmEngine, client: Client) -> None:
    await asyncio.gather(*(asked(engine, variant) for variant in (OLD, NEW, OLD, NEW, NEW)))
    assert sorted(client.prepared) == [7, 8]
    assert engine.variants() == ("mine",)


async def test_only_the_named_variant_is_forgotten(engine: VllmEngine, client: Client) -> None:
    for variant in (OLD, NEW):
        await asked(engine, variant)
    await engine.forget_variant(OLD)
    assert client.forgotten == [7]
    assert await asked(engine, NEW) == 8
    assert client.prepared == [7, 8]
    await engine.forget_variant(OLD)
    assert client.forgotten == [7]


async def test_only_one_variant_before_the_newest_stays(engine: VllmEngine, client: Client) -> None:
    """A client that never unloads variants does not fill the engine with former variants of a name. Uids have
    no order."""
    for uid in (30, 10, 50, 20, 40):
        assert await asked(engine, VariantRef("mine", uid, "/x")) == uid
    assert client.forgotten == [30, 10, 50]
    assert await asked(engine, VariantRef("mine", 20, "/x")) == 20
    assert client.prepared == [30, 10, 50, 20, 40]


async def test_a_request_finds_what_is_dropped_while_it_is_under_way(engine: VllmEngine) -> None:
    await engine.ensure_variant(OLD)
    answering = asyncio.create_task(asked(engine, OLD, pauses=9))
    await asyncio.sleep(0)  # it has begun
    await engine.forget_variant(OLD)
    assert await answering == 7


async def test_the_base_is_never_a_variant(engine: VllmEngine) -> None:
    await engine.ensure_variant(OLD)
    answers: list[int] = []

    async def send(answer: int) -> None:
        answers.append(answer)

    await cast(Any, engine.app)({"model": "mine", "pauses": 1}, None, send)
    assert answers == [0]


def test_the_table_is_a_dict_of_the_requested_variant() -> None:
    table = VariantTable()
    table.load(OLD, "old")
    table.load(NEW, "new")
    table.load(OTHER, "other")
    assert list(table.values()) == ["old", "new", "other"]
    assert list(table) == ["mine", "other"]
    assert "mine" not in table
    with table.asking(NEW):
        assert "mine" in table
        assert table["mine"] == "new"
        assert "other" not in table
        with pytest.raises(KeyError, match="other"):
            table["other"]
        with table.asking(OLD):
            assert table.get("mine") == "old"
        assert table.get("mine") == "new"
        assert table.drop(8)
        assert table.get("mine") == "new"
    with table.asking(NEW):
        assert table.get("mine", "none") == "none"
    assert not table.drop(8)
