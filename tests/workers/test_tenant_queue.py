"""Which grammar is compiled next: each tenant has its share of the process that compiles."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from workers.cache_salt import cache_salt, tenant_of
from workers.engine.checked_grammars import Grammars, Outcome
from workers.engine.tenant_queue import AT_ONCE, OF_A_TENANT, TenantQueue
from workers.messages import VariantRef


def begun(queue: TenantQueue) -> list[bytes]:
    """All grammars that may begin now."""
    return list(iter(queue.begin, None))


def test_a_tenant_leaves_a_place_for_others() -> None:
    queue = TenantQueue()
    for grammar in (b"a1", b"a2", b"a3", b"a4"):
        queue.join(grammar, "a")
    assert begun(queue) == [b"a1", b"a2"]
    queue.join(b"b1", "b")
    assert begun(queue) == [b"b1"]
    queue.join(b"c1", "c")
    assert begun(queue) == []
    queue.end(b"a1")
    assert begun(queue) == [b"c1"], "c has no grammar under way; a has one, and waits longer"
    queue.end(b"b1")
    assert begun(queue) == [b"a3"]
    queue.end(b"c1")
    assert begun(queue) == [], "a has its share"


def test_a_grammar_that_two_tenants_wait_for_is_compiled_in_the_share_of_either() -> None:
    queue = TenantQueue()
    for grammar in (b"a1", b"a2", b"common"):
        queue.join(grammar, "a")
    assert begun(queue) == [b"a1", b"a2"]
    queue.join(b"common", "b")
    assert begun(queue) == [b"common"]
    assert not queue.leave(b"common", "a"), "it is under way"


def test_a_grammar_without_requests_leaves_the_queue() -> None:
    queue = TenantQueue()
    for tenant in ("a", "a", "b"):
        queue.join(b"x", tenant)
    assert not queue.leave(b"x", "a")
    assert not queue.leave(b"x", "b")
    assert queue.leave(b"x", "a")
    assert begun(queue) == []


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 9), st.booleans()), max_size=60))
def test_shares_hold_and_no_grammar_is_forgotten(steps: list[tuple[str, int, bool]]) -> None:
    """A grammar's first letter is its tenant."""
    queue, running, waiting = TenantQueue(), list[bytes](), set[bytes]()

    def go_on() -> None:
        for grammar in begun(queue):
            running.append(grammar)
            waiting.remove(grammar)
        assert len(running) <= AT_ONCE
        assert max(Counter(grammar[:1] for grammar in running).values(), default=0) <= OF_A_TENANT

    for tenant, number, ends in steps:
        grammar = f"{tenant}{number}".encode()
        queue.join(grammar, tenant)
        if grammar not in running:
            waiting.add(grammar)
        if ends and running:
            queue.end(running.pop(0))
        go_on()
    while running:
        queue.end(running.pop(0))
        go_on()
    assert not waiting


def test_a_salt_identifies_the_tenant_only() -> None:
    variant = VariantRef("v", 7, "/v")
    for given_salt in (None, "", "mine", ":", "@", "x" * 500):
        for of_variant in (None, variant):
            assert tenant_of(cache_salt("secret", of_variant, given_salt)) == "secret"
    assert tenant_of(None) == ""


class Compiler:
    """A process that compiles grammars when it is told to. It answers the questions of `Grammars`."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self._told: dict[str, asyncio.Event] = {}
        self._came = asyncio.Condition()

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        regex = json.loads(await reader.readline())["grammar"]["regex"]
        async with self._came:
            self.asked.append(regex)
            self._came.notify_all()
        await self._event(regex).wait()
        writer.write(json.dumps({"backend": "xgrammar", "fields": {}}).encode())
        writer.close()

    def finish(self, regex: str) -> None:
        self._event(regex).set()

    def _event(self, regex: str) -> asyncio.Event:
        return self._told.setdefault(regex, asyncio.Event())

    async def was_asked(self, *regexes: str) -> None:
        async with self._came:
            await self._came.wait_for(lambda: len(self.asked) >= len(regexes))
        assert self.asked == [*regexes]


@asynccontextmanager
async def compiling(folder: Path) -> AsyncIterator[tuple[Compiler, Grammars]]:
    compiler = Compiler()
    server = await asyncio.start_unix_server(compiler.answer, folder / "s")
    grammars = Grammars(folder / "s", "", "hf", 100)
    try:
        yield compiler, grammars
    finally:
        server.close()
        grammars.close()


def regex(text: str) -> dict[str, Any]:
    return {"regex": text}


def test_slow_grammars_of_a_tenant_delay_no_other_tenant(tmp_path: Path) -> None:
    async def run() -> None:
        async with compiling(tmp_path) as (compiler, grammars):
            slow = [asyncio.create_task(grammars.outcome(regex(f"a{n}"), "a")) for n in range(4)]
            await compiler.was_asked("a0", "a1")
            other = asyncio.create_task(grammars.outcome(regex("b"), "b"))
            await compiler.was_asked("a0", "a1", "b")
            compiler.finish("b")
            assert await other == Outcome("", "xgrammar")
            compiler.finish("a0")
            await compiler.was_asked("a0", "a1", "b", "a2")
            for task in slow[1:]:
                task.cancel()
            await asyncio.gather(*slow, return_exceptions=True)
            for name in ("a1", "a2"):
                compiler.finish(name)
            last = asyncio.create_task(grammars.outcome(regex("a4"), "a"))
            await compiler.was_asked("a0", "a1", "b", "a2", "a4")  # not a3: its client left
            compiler.finish("a4")
            await last

    asyncio.run(run())


def test_a_grammar_whose_client_left_is_remembered_if_it_was_compiled(tmp_path: Path) -> None:
    async def run() -> None:
        async with compiling(tmp_path) as (compiler, grammars):
            left = asyncio.create_task(grammars.outcome(regex("x"), "a"))
            await compiler.was_asked("x")
            left.cancel()
            again = asyncio.create_task(grammars.outcome(regex("x"), "b"))
            await asyncio.sleep(0)
            compiler.finish("x")
            assert await again == Outcome("", "xgrammar")
            await grammars.outcome(regex("x"), "b")
            assert compiler.asked == ["x"]

    asyncio.run(run())
