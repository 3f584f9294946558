"""Requests with a grammar wait until it has been compiled once, in another process with limits
(`grammar_process`).

vLLM's own validation runs on the event loop, where one large schema stops every stream. A grammar from the
other process needs no such validation: its request uses that result. The result of each grammar is
remembered, so that only its first request waits. Each tenant has its share of the process
(`tenant_queue`).
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import signal
import subprocess
import sys
from collections import OrderedDict
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from workers.cache_salt import tenant_of
from workers.clean_environment import clean_environment
from workers.engine.tenant_queue import TenantQueue
from workers.group import grammar_process
from workers.group.grammar_process import CPU_S, FIELDS, TOO_LARGE
from workers.patches.vllm import grammar_validation

log = logging.getLogger(__name__)

KEPT = 512  # grammars whose result is remembered
# Each thread of a compiler that waits for another would reserve 64 MiB of the address space that is limited.
ONE_ARENA = {"MALLOC_ARENA_MAX": "1"}
START_S = 120.0
OPTIONS = ("disable_any_whitespace", "disable_additional_properties", "whitespace_pattern")
ADVICE = "make it smaller, with fewer alternatives and without repetitions within repetitions"


class GrammarsAway(RuntimeError):
    """The process that compiles grammars ended twice; this is no statement about the grammar."""


@dataclass(frozen=True)
class Outcome:
    """The result for a grammar. `refusal` is empty if it may be used; then `fields` are the fields that vLLM
    changed.
    """

    refusal: str
    backend: str = ""
    fields: tuple[tuple[str, Any], ...] = ()


@dataclass(frozen=True)
class _Asked:
    """A grammar without a result yet, and the future of its result."""

    grammar: dict[str, Any]
    outcome: asyncio.Future[Outcome]


class Grammars:
    """The grammars of one engine, in its server's event loop."""

    def __init__(self, socket: Path, tokenizer: str, mode: str, vocabulary: int) -> None:
        self._socket = socket
        self._with = {"tokenizer": tokenizer, "mode": mode, "vocabulary": vocabulary}
        self._known: OrderedDict[bytes, Outcome] = OrderedDict()
        self._asked: dict[bytes, _Asked] = {}
        self._queue = TenantQueue()
        self._tasks: set[asyncio.Task[None]] = set()
        self._started: subprocess.Popen[bytes] | None = None

    async def outcome(self, grammar: dict[str, Any], tenant: str = "") -> Outcome:
        """The result for the fields of a grammar in a request of this tenant. Raises GrammarsAway."""
        key = hashlib.sha256(json.dumps(grammar).encode()).digest()
        if key in self._known:
            self._known.move_to_end(key)
            return self._known[key]
        if key not in self._asked:
            self._asked[key] = _Asked(grammar, asyncio.get_running_loop().create_future())
        outcome = self._asked[key].outcome
        self._queue.join(key, tenant)
        self._begin()
        try:
            return await asyncio.shield(outcome)  # other requests may wait for it, too
        finally:
            if not outcome.done() and self._queue.leave(key, tenant):  # the client left
                del self._asked[key]

    def _begin(self) -> None:
        while (key := self._queue.begin()) is not None:
            task = asyncio.create_task(self._compile(key))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _compile(self, key: bytes) -> None:
        asked = self._asked[key]
        try:
            outcome = await self._answer(asked.grammar)
        except Exception as error:
            asked.outcome.set_exception(error)
        else:
            asked.outcome.set_result(outcome)
            self._remember(key, outcome)
        del self._asked[key]
        self._queue.end(key)
        self._begin()

    def _remember(self, key: bytes, outcome: Outcome) -> None:
        self._known[key] = outcome
        if len(self._known) > KEPT:
            self._known.popitem(last=False)

    async def _answer(self, grammar: dict[str, Any]) -> Outcome:
        question = json.dumps({**self._with, "grammar": grammar}).encode() + b"\n"
        for _ in range(2):
            answer = await self._exchange(question)
            if answer and answer.get("signal") != -signal.SIGKILL:  # for example from the kernel
                return _outcome(answer)
        raise GrammarsAway("the process that compiles grammars was killed twice; send the request again")

    async def _exchange(self, question: bytes) -> dict[str, Any]:
        """Ask the process; empty if it ended."""
        try:
            reader, writer = await self._connected()
            writer.write(question)
            answer = await reader.read(-1)
        except OSError as e:
            log.warning("the process that compiles grammars did not answer: %s", e)
            return {}
        writer.close()
        return dict(json.loads(answer or b"{}"))

    async def _connected(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        for _ in range(int(START_S / 0.1)):
            try:
                return await asyncio.open_unix_connection(self._socket)
            except OSError:
                self._start()
                await asyncio.sleep(0.1)
        raise TimeoutError(f"the process did not start within {START_S:.0f} s")

    def _start(self) -> None:
        """Start the process again, unless it is starting."""
        if self._started is not None and self._started.poll() is None:
            return
        self._started = subprocess.Popen(
            [sys.executable, "-m", grammar_process.__name__, str(self._socket)],
            env=clean_environment() | ONE_ARENA,
            stdin=subprocess.DEVNULL,
        )

    def close(self) -> None:
        if self._started is not None:
            self._started.kill()
            self._started.wait()


def _outcome(answer: dict[str, Any]) -> Outcome:
    if "fields" in answer:
        return Outcome("", answer["backend"], tuple(answer["fields"].items()))
    if "invalid" in answer:
        return Outcome(answer["invalid"])
    too_long = f"compiling it, or finding its next tokens, takes more than {CPU_S} s of CPU time"
    of_signal = {-signal.SIGXCPU: too_long, -signal.SIGALRM: "the compiler hung", 1: TOO_LARGE}
    if answer.get("large"):  # compilers abort when they get no memory
        of_signal[-signal.SIGABRT] = TOO_LARGE
    broke = f"the compiler crashed, or {TOO_LARGE}"
    reason = answer.get("refused") or of_signal.get(int(answer.get("signal", 0)), broke)
    return Outcome(f"the grammar cannot be used: {reason}; {ADVICE}")


def check_grammars(llm: Any, grammars: Grammars) -> None:
    """Make every request of this AsyncLLM, and of copies of it, pass `grammars`."""
    llm.grammars = grammars  # closed with the engine
    grammar_validation.install(llm, partial(_check, grammars))


def _salt(prompt: Any) -> str | None:
    """The cache salt of a prompt as vLLM passes it: a dictionary, or a request for its core."""
    salt = prompt.get("cache_salt") if isinstance(prompt, dict) else getattr(prompt, "cache_salt", None)
    return salt if isinstance(salt, str) else None


async def _check(grammars: Grammars, prompt: Any, outputs: Any) -> None:
    """Check a request's grammar. Raises vLLM's request error."""
    from vllm.exceptions import VLLMValidationError

    outcome = await grammars.outcome(
        {name: getattr(outputs, name) for name in (*FIELDS, *OPTIONS)}, tenant_of(_salt(prompt))
    )
    if outcome.refusal:
        raise VLLMValidationError(outcome.refusal, parameter="structured_outputs")
    for name, value in outcome.fields:
        setattr(outputs, name, value)
    outputs._backend, outputs._backend_was_auto = outcome.backend, True
