"""Our scheduler inside vLLM: one slot for many variants gives the same answers as many slots, and no request
starves."""

from __future__ import annotations

import asyncio
import os
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from testkit import random_variants
from testkit.workers.engines import BLOCK, DEADLINE_S, SURROUNDINGS, Engine, write_base
from workers.bus.client import VariantClient
from workers.engine import scheduler as scheduler_module
from workers.engine.scheduler import IDLE_S

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

PROMPTS = ([5, 9, 2, 33], [(7 * n + 3) % 61 for n in range(2 * BLOCK + 5)])
ALMOST_DONE = 8


@pytest.fixture(scope="module", autouse=True)
def surroundings() -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(SURROUNDINGS)
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_base(tmp_path_factory.mktemp("models") / "base")


@pytest.fixture(scope="module")
def variants(base: Path) -> dict[str, Any]:
    """A request's variant by name; None is the base."""
    from vllm.lora.request import LoRARequest

    made: dict[str, Any] = {"base": None}
    for uid, variant in enumerate(random_variants.EVERY_KIND, start=1):
        folder = random_variants.write(base, base.parent / variant.name, variant)
        made[variant.name] = LoRARequest(variant.name, uid, str(folder))
    return made


@pytest.fixture(scope="module")
def roomy(base: Path, surroundings: None) -> Iterator[Engine]:
    """A seat for everybody, and no cache of prefixes: what the others are compared with."""
    engine = Engine.start(base, slots=8, enable_prefix_caching=False)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def narrow(base: Path, surroundings: None) -> Iterator[Engine]:
    """One seat, with a cache of prefixes."""
    engine = Engine.start(base, slots=1, enable_prefix_caching=True)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def own(base: Path, surroundings: None) -> Iterator[Engine]:
    """One seat, given by vLLM's own scheduler. (Closing one engine of a process ends them all.)"""
    engine = Engine.start(base, slots=1, scheduler=None, enable_prefix_caching=False)
    yield engine
    engine.close()


def answers(engine: Engine, asked: dict[str, tuple[list[int], Any, int]]) -> dict[str, list[int]]:
    for name, (prompt, variant, tokens) in asked.items():
        engine.add(name, prompt, variant, tokens)
    engine.run()
    return {name: engine.tokens[name] for name in asked}


def test_every_variant_answers_the_same_with_one_seat(
    roomy: Engine, narrow: Engine, variants: dict[str, Any]
) -> None:
    """The prompts are the same for all: a prefix cached for one variant must not serve another."""
    asked = {
        f"{name}:{n}:{again}": (prompt, variant, 12 + 3 * n)
        for again in range(2)
        for n, prompt in enumerate(PROMPTS)
        for name, variant in variants.items()
    }
    expected = answers(roomy, asked)
    assert answers(narrow, asked) == expected
    long = {tuple(expected[f"{name}:1:0"]) for name in variants}
    assert len(long) > len(variants) // 2  # the variants do change what is said
    narrow.scheduler.reset_prefix_cache()


def test_two_variants_of_one_name_in_a_batch(roomy: Engine, variants: dict[str, Any]) -> None:
    """A name was registered again. To vLLM requests for adapters of one name are equal."""
    from vllm.lora.request import LoRARequest

    of = ("lora-r8", "sparse-4bit")
    expected = answers(roomy, {name: (PROMPTS[1], variants[name], 12) for name in of})
    same = [LoRARequest("mine", 100 + i, variants[name].lora_path) for i, name in enumerate(of)]
    assert same[0] == same[1]
    found = answers(roomy, {f"mine{i}": (PROMPTS[1], request, 12) for i, request in enumerate(same)})
    assert list(found.values()) == list(expected.values())
    assert found["mine0"] != found["mine1"]


def stream(engine: Engine, of: Any, blocked: Any, length: int) -> None:
    """Requests of one variant that overlap without end, and one of another that comes soon after."""
    for number in range(length):
        engine.add(f"stream{number}", PROMPTS[0], of, 24)
        if number == 0:
            engine.until(lambda: "stream0" in engine.tokens)
            engine.add("blocked", PROMPTS[0], blocked, 12)
        for _ in range(6):
            engine.step()
    engine.run()


def test_a_blocked_variant_is_served_in_bounded_time(
    roomy: Engine, narrow: Engine, own: Engine, variants: dict[str, Any]
) -> None:
    of, blocked = variants["lora-r8"], variants["sparse-4bit"]
    length = 20
    asked = {f"stream{n}": (PROMPTS[0], of, 24) for n in range(length)}
    asked["blocked"] = (PROMPTS[0], blocked, 12)
    expected = answers(roomy, asked)

    first, preempted = narrow.steps, narrow.scheduler.preemptions
    stream(narrow, of, blocked, length)
    ours = narrow.begun["blocked"] - first
    assert {name: narrow.tokens[name] for name in asked} == expected  # of the preempted ones, too
    assert narrow.scheduler.preemptions > preempted
    # the first request's tokens, an almost finished child's, and those of steps already under way
    assert ours <= 24 + ALMOST_DONE + 2

    stream(own, of, blocked, length)
    assert {name: own.tokens[name] for name in asked} == expected
    print("\nthe blocked request begins at step", ours, "with vLLM's own scheduler at", own.begun["blocked"])
    assert own.begun["blocked"] > max(own.begun[f"stream{n}"] for n in range(length))


def test_requests_of_a_variant_without_files_end_and_others_continue(
    narrow: Engine, variants: dict[str, Any], tmp_path: Path
) -> None:
    from vllm.lora.request import LoRARequest

    folder = tmp_path / "vanishing"
    shutil.copytree(variants["lora-r8"].lora_path, folder)
    variant = LoRARequest("vanishing", 101, str(folder))
    shutil.rmtree(folder)
    narrow.add("long", PROMPTS[0], variants["boft-m1"], 60)
    narrow.until(lambda: "long" in narrow.tokens)
    narrow.add("lost", PROMPTS[0], variant)
    narrow.add("plain", PROMPTS[0], None)
    narrow.run()
    assert narrow.ended["lost"][1] == "error"
    assert narrow.tokens["lost"] == []
    assert [narrow.ended[name][1] for name in ("long", "plain")] == ["length", "length"]

    shutil.copytree(variants["lora-r8"].lora_path, folder)  # the next request tries again
    narrow.add("found", PROMPTS[0], variant)
    narrow.run()
    assert narrow.ended["found"][1] == "length"
    assert narrow.scheduler._residency.take_failures() == {}


def test_a_variant_that_waits_for_a_slot_is_read_meanwhile(
    narrow: Engine, variants: dict[str, Any], tmp_path: Path
) -> None:
    from vllm.lora.request import LoRARequest

    folder = shutil.copytree(variants["lora-r8"].lora_path, tmp_path / "unread")
    residency = narrow.scheduler._residency

    def tier() -> str | None:
        return next((v["tier"] for v in residency.snapshot() if v["uid"] == 102), None)

    narrow.add("holds", PROMPTS[0], variants["boft-m1"], 40)
    narrow.until(lambda: "holds" in narrow.tokens)
    narrow.add("waits", PROMPTS[0], LoRARequest("unread", 102, str(folder)), 8)
    for _ in range(2):  # nothing happens between steps: it keeps its seat
        narrow.step()
    deadline = time.monotonic() + DEADLINE_S
    while tier() != "host":
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert "holds" not in narrow.ended
    narrow.run()
    narrow.add("again", PROMPTS[0], variants["lora-r8"], 8)
    narrow.run()
    assert narrow.tokens["waits"] == narrow.tokens["again"]


def test_the_engine_is_not_stepped_without_pause_while_a_variant_is_read(
    base: Path, narrow: Engine, tmp_path: Path
) -> None:
    """Or the threads that read it hardly run, where engine and caller are one process."""
    from vllm.lora.request import LoRARequest

    rare = random_variants.write(base, tmp_path / "rare", random_variants.EVERY_KIND[0])
    narrow.add("rare", PROMPTS[0], LoRARequest("rare", 501, str(rare)), 2)
    began_s, steps = time.monotonic(), 0
    while "rare" not in narrow.tokens:
        for output in narrow.llm.llm_engine.step():
            narrow.tokens[output.request_id] = list(output.outputs[0].token_ids)
        steps += 1
    narrow.run()
    assert steps <= (time.monotonic() - began_s) / IDLE_S + 10


def test_held_requests_count_and_may_be_aborted(narrow: Engine, variants: dict[str, Any]) -> None:
    scheduler = narrow.scheduler
    narrow.add("runs", PROMPTS[0], variants["lora-r8"], 40)
    narrow.until(lambda: "runs" in narrow.tokens)
    for number in range(5):
        narrow.add(f"held{number}", PROMPTS[0], variants["svd"], 8)
    for _ in range(3):
        narrow.step()
    assert scheduler.get_num_unfinished_requests() == 6
    assert scheduler.get_request_counts() == (1, 5)
    assert not any(name.startswith("held") for name in narrow.tokens)
    held = [i for i in scheduler.requests if i.startswith("held")]
    narrow.llm.llm_engine.abort_request([i for i in held if not i.startswith("held4")], internal=True)
    narrow.step()
    assert scheduler.get_num_unfinished_requests() == 2
    narrow.run()
    assert narrow.ended["held4"][1] == "length"
    assert not {f"held{n}" for n in range(4)} & narrow.ended.keys()
    narrow.add("last", PROMPTS[0])
    narrow.run()
    narrow.step()
    assert not scheduler.requests
    assert not scheduler._uses
    assert len(scheduler._records._numbers.of) <= 1  # the last one is forgotten with the next step


def test_a_forgotten_variant_leaves_memory_after_its_last_request(
    narrow: Engine, variants: dict[str, Any]
) -> None:
    variant = variants["lora-r8"]
    narrow.add("last", PROMPTS[0], variant, 12)
    narrow.until(lambda: "last" in narrow.tokens)

    async def forget() -> list[int]:
        client = VariantClient(narrow.address)
        try:
            await client.forget(variant.lora_int_id)
            return [v["uid"] for v in (await client.state())["variants"]]
        finally:
            client.close()

    assert variant.lora_int_id in asyncio.run(forget())  # a request of it runs
    narrow.run()
    assert narrow.ended["last"][1] == "length"
    assert variant.lora_int_id not in asyncio.run(forget())
    narrow.add("anew", PROMPTS[0], variant, 12)
    narrow.run()
    assert narrow.tokens["anew"] == narrow.tokens["last"]


def rank_of(engine: Engine) -> Any:
    """Its variants, on its only rank."""
    worker = engine.core.model_executor.driver_worker.worker
    return worker.model_runner.lora_manager.variant_cache


def test_a_variant_that_only_has_to_be_copied_runs_in_the_step_that_gives_it_its_slot(
    narrow: Engine, variants: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduler_module, "PLACING_S", DEADLINE_S)
    monkeypatch.setattr(rank_of(narrow), "streams", lambda uid: True)
    expected: dict[str, list[int]] = {}
    for name in ("lora-r8", "rslora-r16", "lora-r8"):  # in the one slot by turns
        narrow.add(name, PROMPTS[0], variants[name], 8)
        narrow.run()
        expected.setdefault(name, narrow.tokens.pop(name))
    steps: list[int] = []
    inner = narrow.scheduler._note_scheduled

    def note(output: Any) -> None:
        steps.append(len(output.num_scheduled_tokens))
        inner(output)

    monkeypatch.setattr(narrow.scheduler, "_note_scheduled", note)
    narrow.add("rslora-r16", PROMPTS[0], variants["rslora-r16"], 8)
    narrow.step()
    assert steps[0] == 1
    narrow.run()
    assert narrow.tokens["rslora-r16"] == expected["rslora-r16"]


def test_a_copy_that_fails_under_way_ends_the_requests_that_run_with_it(
    narrow: Engine, variants: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tensors of a missing variant belong to no variant, and nothing waits for them."""
    failing = threading.Event()

    def settle() -> None:
        assert failing.wait(DEADLINE_S)
        raise RuntimeError("lost on the way")

    narrow.add("before", PROMPTS[0], variants["rslora-r16"], 30)
    narrow.run()
    narrow.add("other", PROMPTS[0], variants["lora-r8"], 8)  # takes the slot
    narrow.run()
    with monkeypatch.context() as patch:
        patch.setattr(rank_of(narrow), "settle", settle)
        narrow.add("lost", PROMPTS[0], variants["rslora-r16"], 30)
        narrow.add("plain", PROMPTS[0], None, 40)
        narrow.until(lambda: narrow.tokens.get("lost"))
        failing.set()
        narrow.run()
    assert narrow.ended["lost"][1] == "error"
    assert len(narrow.tokens["lost"]) < 30
    assert narrow.ended["plain"][1] == "length"
    narrow.add("after", PROMPTS[0], variants["rslora-r16"], 30)
    narrow.run()
    assert narrow.tokens["after"] == narrow.tokens["before"]
