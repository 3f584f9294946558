"""Hostile bodies that try to break an engine, drawn from vLLM's own description, and their results.

The bodies pass through a gateway's checks and changes. The worker's answers are read as a gateway reads them.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any, TypeVar

from controlplane import errors
from controlplane.api.inference.body import parse_body
from controlplane.api.inference.engine_call import engine_call
from controlplane.gateway.engine_errors import from_engine, from_engine_event
from controlplane.traffic.body_bounds import MAX_BODY_PARTS, check_parts
from controlplane.traffic.endpoints import CHAT, COMPLETIONS, ENDPOINTS
from controlplane.traffic.route_table import Route
from controlplane.traffic.tenants import Quota, Tenant
from testkit import random_adapters, random_variants, started_worker
from testkit.engine_configs import ranks_of, vllm_config
from testkit.fuzz import engine_memory, hostile_json
from testkit.fuzz.engine_memory import Growth
from testkit.fuzz.hostile_requests import Drawer
from testkit.random_adapters import RandomLora
from workers.engine.tenant_queue import AT_ONCE
from workers.group import grammar_process
from workers.messages import ERROR_EVENT, EngineCall, EngineConfig, EngineReply, VariantRef
from workers.server.worker import Worker

T = TypeVar("T")

PATHS = (COMPLETIONS, CHAT)
LAYERS, ROWS, MAX_MODEL_LEN, MAX_OUTPUT = 2, 8, 256, 32
WAIT_S = 120.0  # the machine may be busy
KV_CACHE_BYTES = 32 << 20  # 10,900 tokens, filled before memory is measured: planned memory is no growth
FILLING, FILLED_AT_ONCE = 64, 16  # prompts of nearly MAX_MODEL_LEN tokens
MEMORY_BYTES = 256 << 20  # most memory that bodies may add to an engine's processes
GRAMMAR_BYTES = AT_ONCE * grammar_process.MEMORY_BYTES  # most memory of the children that compile them
NO_SEED = -1  # of a failure that no single body caused
GOOD_EVERY = 50  # after this number of bodies, a good request must be answered
NAMES = ("base", "v1")
COUNTED = Tenant("t", quota=Quota(tokens_per_minute=1e9), cache_salt="t")
OF_VERSIONS = json.loads((Path(__file__).parents[2] / "tests/api/vllm_request_fields.json").read_text())
GRAMMARS = (
    *("root ::= root", 'root ::= "a" root', "root ::=", "", 'x ::= "a"', 'root ::= "\\u0000"'),
    *("root ::= [^\\x00-\\U0010ffff]", f'root ::= "{"a" * 300}"'),
)
PATTERNS = (
    *("[^\\s\\S]", "a{5000}", "(a|b)*c", "\\b", "^$", "", "(?=a)b", "\\uD800", "[z-a]", "(a{100}){100}"),
    *("[\\x00]", "\\p{L}", "(", "a**"),
)
SCHEMAS: tuple[Any, ...] = (
    *({}, False, True, "{", {"type": "x"}, {"enum": []}, {"$ref": "#"}, {"$ref": "#/a"}, {"anyOf": []}),
    *({"not": {}}, {"const": None}, {"type": "integer", "minimum": 5, "maximum": 1}),
    *({"type": "string", "minLength": 9, "maxLength": 2}, {"type": "array", "minItems": 10**6}),
    {"type": "object", "properties": {}, "additionalProperties": False, "required": ["a"]},
)
CHOICES: tuple[Any, ...] = ([], [""], ["a", ""], ["\x00"], ["\ud800"], ["é"] * 3, [1])
# The fields of both supported versions of vLLM: bodies have fields of the other version, too.
NAMED = {
    path: sorted(
        {name for fields in OF_VERSIONS.values() for name in fields[path]} | ENDPOINTS[path].fields.keys()
    )
    for path in PATHS
}
# Bodies that harmed an engine or its other requests before they were bounded.
ATTACKS: tuple[tuple[str, dict[str, Any]], ...] = (
    (CHAT, {"chat_template_kwargs": {"tokenize": True, "padding": "max_length", "max_length": 2 * 10**7}}),
    (CHAT, {"mm_processor_kwargs": {"num_crops": 10**9}, "media_io_kwargs": {"video": {"num_frames": -1}}}),
    (
        CHAT,
        {
            "documents": [{"text": "a" * 1_000}] * 500,
            "chat_template": "{% for _ in range(10**9) %}{% endfor %}",
        },
    ),
    (COMPLETIONS, {"structured_outputs": {"regex": "(([a-z ]{1,40}){1,40}){1,40}"}}),
    (COMPLETIONS, {"structured_outputs": {"regex": "([a-z]+ ?)*[.]"}, "ignore_eos": True}),
    (COMPLETIONS, {"structured_outputs": {"regex": "[a-z]{0,90}[a-z]{0,90}[a-z]{0,90}[a-z]{0,90}"}}),
    (COMPLETIONS, {"repetition_detection": {"max_pattern_size": 10**9, "min_count": 2}}),
    (
        COMPLETIONS,
        {"vllm_xargs": {"kv_transfer_params": "x"}, "kv_transfer_params": {"do_remote_prefill": True}},
    ),
    (COMPLETIONS, {"use_beam_search": True, "n": 16, "length_penalty": 1e3}),
    (COMPLETIONS, {"stream": True, "stream_interval": 1_000, "n": 4, "temperature": 1}),
    (COMPLETIONS, {"prompt": [1] * 100_000, "truncate_prompt_tokens": -1}),
    (COMPLETIONS, {"prompt_embeds": "AAAA" * 1_000}),
)
GOOD_SHARE = 0.35
WORDS = ("once", "upon", "a", "time", "naïve", "世界", "👍", "x" * 40, "\n", "42")
GOOD_FIELDS: dict[str, tuple[Any, ...]] = {
    "temperature": (0, 0.3, 1, 2),
    "top_p": (0.1, 0.9, 1),
    "top_k": (-1, 1, 50),
    "min_p": (0, 0.2),
    "n": (1, 2, 3),
    "seed": (0, 7, 2**31),
    "presence_penalty": (-2, 0.5),
    "frequency_penalty": (-0.5, 2),
    "repetition_penalty": (0.8, 1.2),
    "stop": ("a", [" the", "\n"], []),
    "stop_token_ids": ([5], [2, 17, 40_000]),
    "min_tokens": (0, 1),
    "ignore_eos": (True, False),
    "logit_bias": ({"5": -100}, {"5": 3.5, "17": 100}),
    "bad_words": (["time"], ["a", "naïve"]),
    "allowed_token_ids": ([5, 6, 7], list(range(100, 200))),
    "include_stop_str_in_output": (True,),
    "skip_special_tokens": (True, False),
    "spaces_between_special_tokens": (True, False),
    "return_token_ids": (True,),
    "return_tokens_as_token_ids": (True,),
    "user": ("u1",),
}
GOOD_FIELDS_OF: dict[str, dict[str, tuple[Any, ...]]] = {
    COMPLETIONS: {"logprobs": (0, 5), "echo": (True,), "prompt_logprobs": (0, 2)},
    CHAT: {"logprobs": (True,), "top_logprobs": (0, 5), "max_completion_tokens": (1, 8)},
}
GOOD_GRAMMARS: tuple[dict[str, Any], ...] = (
    {"regex": "[a-z]{1,8}( [a-z]{1,8}, ){0,3}"},
    {"regex": "(yes|no)"},
    {"choice": ["positive", "negative", "世界"]},
    {"json_object": True},
    {"json": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}},
    {"json": {"type": "array", "items": {"enum": ["x", "y"]}, "maxItems": 4}},
    {"json": {"type": "integer", "multipleOf": 5}},  # guidance's, not xgrammar's
    {"grammar": 'root ::= "a" | "b" root'},
)
TAGS = (
    "{}",
    "x",
    '{"type": "structural_tag"}',
    '{"type": "structural_tag", "structures": [], "triggers": []}',
)


@dataclass
class Found:
    """`codes` of the answers: "ok", or an error's. `passed`: how often each field reached the worker.
    `broken`: seeds and their failures. `growth`: of the memory of one engine's processes. `alone_s` and
    `beside_s`: times of two other tenants' answers before and during these bodies."""

    codes: Counter[str] = field(default_factory=Counter)
    passed: Counter[str] = field(default_factory=Counter)
    broken: list[dict[str, Any]] = field(default_factory=list)
    slowest_s: float = 0.0
    slowest_seed: int = -1
    growth: Growth = field(default_factory=Growth)
    alone_s: list[float] = field(default_factory=list)
    beside_s: list[float] = field(default_factory=list)

    def add(self, other: Found) -> None:
        self.codes += other.codes
        self.passed += other.passed
        self.broken += other.broken
        self.growth.add(other.growth)
        self.alone_s += other.alone_s
        self.beside_s += other.beside_s
        if other.slowest_s > self.slowest_s:
            self.slowest_s, self.slowest_seed = other.slowest_s, other.slowest_seed


class Bodies:
    """`description`: vLLM's own, as OpenAPI has it."""

    def __init__(self, description: dict[str, Any]) -> None:
        self._drawer = Drawer(description, "/nowhere")
        posts = {path: description["paths"][path]["post"] for path in PATHS}
        self._schemas = {
            path: post["requestBody"]["content"]["application/json"]["schema"] for path, post in posts.items()
        }

    def draw(self, seed: int) -> tuple[str, bytes]:
        """A path and a body for it."""
        random = Random(seed)
        if random.random() < 0.02:
            path, attack = random.choice(ATTACKS)
            told = {"messages": [{"role": "user", "content": "a"}]} if path == CHAT else {"prompt": "a"}
            return path, json.dumps(
                {"model": random.choice(NAMES), "max_tokens": 8, **told, **attack}
            ).encode()
        path = random.choice(PATHS)
        if random.random() < GOOD_SHARE:
            return path, json.dumps(good(path, random)).encode()
        value = self._drawer.example(self._schemas[path], random, random.choice((0.0, 0.03, 0.08, 0.2)))
        chance = random.random()
        if chance < 0.3:
            value = {**value, **_asking_for_a_form(random)}  # the schema's own example stays as it is
        elif chance < 0.8:
            value = hostile_json.mutated(value, random, random.choice((1, 1, 1, 2)))
        if isinstance(value, dict):
            if random.random() < 0.2:
                value = {**value, random.choice(NAMED[path]): hostile_json.hostile(random)}
            value = {**value, "model": random.choice(NAMES)}
            if random.random() < 0.8:
                value["max_tokens"] = random.choice((1, 4, 8))
        return path, hostile_json.written(value)


def good(path: str, random: Random) -> dict[str, Any]:
    """A body that asks for nothing that is refused: some of GOOD_FIELDS, and perhaps a grammar."""
    fields = GOOD_FIELDS | GOOD_FIELDS_OF[path]
    chosen = random.sample(sorted(fields), random.randint(0, 5))
    body = {name: random.choice(fields[name]) for name in chosen}
    if random.random() < 0.3:
        body |= {"structured_outputs": random.choice(GOOD_GRAMMARS)}
    if body.get("n", 1) > 1:
        body["temperature"] = 0.8
    if "top_logprobs" in body:
        body["logprobs"] = True
    if random.random() < 0.4 and not body.keys() & {"prompt_logprobs", "echo"}:
        body |= {"stream": True} | random.choice(({}, {"stream_options": {"include_usage": True}}))
    return {
        "model": random.choice(NAMES),
        "max_tokens": random.choice((1, 4, 16)),
        **body,
        **_asked(path, random),
    }


def _asked(path: str, random: Random) -> dict[str, Any]:
    words = " ".join(random.choices(WORDS, k=random.choice((1, 5, 40))))
    if path == COMPLETIONS:
        return {"prompt": random.choice((words, [words, "a"], [5, 99, 1234], [[7, 8], [9]]))}
    turns = [{"role": "user", "content": words}, {"role": "assistant", "content": "yes"}]
    last = {"role": "user", "content": random.choice((words, [{"type": "text", "text": words}]))}
    return {"messages": [*random.choice(([], turns, [{"role": "system", "content": "Be brief."}])), last]}


def _asking_for_a_form(random: Random) -> dict[str, Any]:
    """The fields that request a form of the answer."""
    schema = random.choice(SCHEMAS)
    if random.random() < 0.2:
        named = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        return {"response_format": random.choice(({"type": "json_object"}, {"type": "x"}, named))}
    form = random.choice(
        (
            *({"grammar": random.choice(GRAMMARS)}, {"regex": random.choice(PATTERNS)}),
            *({"choice": random.choice(CHOICES)}, {"json": schema}, {"json_object": True}, {}),
            {"structural_tag": random.choice(TAGS)},
            {"grammar": GRAMMARS[0], "regex": PATTERNS[0]},
        )
    )
    return {"structured_outputs": form, "stream": random.random() < 0.5}


# --- an engine, and what becomes of it -------------------------------------------------------------------


@dataclass
class Served:
    """`on_call` sees each call that a gateway would send."""

    worker: Worker
    variants: dict[str, VariantRef]
    description: dict[str, Any]
    on_call: Callable[[EngineCall], None] = lambda call: None

    async def asked(self, path: str, raw: bytes) -> str:
        """How a gateway's answer ends: "ok", or with an error's code. Raises what no gateway would send."""
        try:
            call = self._call(path, raw)
            self.on_call(call)
            reply = await self.worker.call(call)
            _raise_errors(reply, call.grammar)
        except errors.OstinatoError as e:
            if e.status >= 500:
                raise
            return e.code
        return "ok"

    def _call(self, path: str, raw: bytes) -> EngineCall:
        check_parts(raw, MAX_BODY_PARTS)
        body = parse_body(raw)
        variant = self.variants.get(body["model"])
        route = Route(body["model"], "base", MAX_OUTPUT, variant, 0.0)
        return engine_call(path, body, route, raw, tenant=COUNTED)


def _raise_errors(reply: EngineReply, grammar: str) -> None:
    if reply.status >= 300:
        raise from_engine(reply.status, reply.body, grammar)
    for event in reply.body.split(b"\n\n"):
        if event.startswith(ERROR_EVENT):
            raise from_engine_event(event, grammar)


@contextlib.contextmanager
def serving(
    folder: Path, base: Path, device: Device | None = None
) -> Iterator[tuple[Served, asyncio.AbstractEventLoop]]:
    """A worker with `base` (of LAYERS layers) and an adapter; without a device on the CPU. Takes 25 s."""
    adapter = random_adapters.write(base, folder / "v1", RandomLora("v1", rank=4, seed=1))
    config = _config(base, device or ON_CPU)
    with started_worker.started(config, started_worker.ONE_THREAD) as (worker, loop):
        description = worker.engine.app.openapi()  # type: ignore[attr-defined]  # it is vLLM's
        yield Served(worker, {"v1": VariantRef("v1", 1, str(adapter))}, description), loop


@dataclass(frozen=True)
class Device:
    """The device of an engine's rank, and the memory that it may take there."""

    kind: str
    memory_bytes: int


ON_CPU = Device("cpu", 2 << 30)


def smollm2_layers(smollm2: Path, folder: Path) -> Path:
    """The first LAYERS layers of SmolLM2, for `serving`."""
    return random_variants.first_layers(smollm2, folder / "base", LAYERS)


def _config(base: Path, device: Device) -> EngineConfig:
    return vllm_config(
        base,
        ranks_of(
            (LAYERS,),
            kv_cache_bytes=KV_CACHE_BYTES,
            memory_bytes=device.memory_bytes,
            variant_memory_bytes=64 << 20,
            device_kind=device.kind,
        ),
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=16,
        variant_host_bytes=1 << 28,
    )


FIRST: tuple[tuple[str, dict[str, Any]], ...] = (
    (
        COMPLETIONS,
        {"model": "base", "prompt": "a", "max_tokens": 2, "structured_outputs": {"regex": "a"}},
    ),
    (CHAT, {"model": "base", "messages": [{"role": "user", "content": "a"}], "max_tokens": 2}),
)


async def prepare(to: Served) -> None:
    """Start what starts with its first request, and use the memory that is planned: neither is growth."""
    for path, body in FIRST:
        await to.asked(path, json.dumps(body).encode())
    await _fill_memory(to)


async def ask_with_others(
    to: Served,
    seeds: Iterable[int],
    rows: int,
    alone_s: float,
    together: Callable[[], Awaitable[None]] | None = None,
    found: Found | None = None,
) -> Found:
    """Ask the bodies of these seeds, while two tenants each send one request after the other.

    Before that the two are alone for `alone_s`. `together` waits for other engines of this machine, so that
    all of them are alone at the same time. Results are added to `found` as they come.
    """
    found = Found() if found is None else found
    await prepare(to)
    if together:
        await together()
    await Others(to, found.alone_s).go_on(asyncio.sleep(alone_s))
    if together:
        await together()
    watch = engine_memory.Watch()
    found.growth = watch.growth
    await Others(to, found.beside_s).go_on(watch.watched(ask(to, seeds, rows, found)))
    if found.growth.own > MEMORY_BYTES:
        found.broken.append({"seed": NO_SEED, "what": f"memory grew by {found.growth.own} bytes"})
    if found.growth.grammar_bytes > GRAMMAR_BYTES:
        what = f"grammars that were compiled took {found.growth.grammar_bytes} bytes"
        found.broken.append({"seed": NO_SEED, "what": what})
    return found


async def _fill_memory(to: Served) -> None:
    """Use each block of the KV cache once, and the largest steps that good requests may ask for: the kernel
    gives memory at its first use, and the allocator keeps it."""
    left = iter(range(FILLING))

    async def one_after_the_other() -> None:
        for seed in left:
            prompt = [Random(seed).randrange(5, 40_000) for _ in range(MAX_MODEL_LEN - 8)]
            body = {"model": "base", "prompt": prompt, "max_tokens": 1, "prompt_logprobs": 5}
            code = await to.asked(COMPLETIONS, json.dumps(body).encode())
            assert code == "ok", code

    await asyncio.gather(*(one_after_the_other() for _ in range(FILLED_AT_ONCE)))


class Others:
    """Two tenants, who are answered at the base and at a variant."""

    def __init__(self, to: Served, took_s: list[float]) -> None:
        self._to, self._took_s = to, took_s

    async def go_on(self, during: Coroutine[Any, Any, T]) -> T:
        asking = [asyncio.create_task(self._one_after_the_other(name)) for name in NAMES]
        try:
            return await during
        finally:
            for task in asking:
                task.cancel()
            await asyncio.gather(*asking, return_exceptions=True)

    async def _one_after_the_other(self, name: str) -> None:
        body = {"model": name, "prompt": "Once upon a time", "max_tokens": 8, "ignore_eos": True}
        while True:
            began_s = time.monotonic()
            code = await self._to.asked(COMPLETIONS, json.dumps(body).encode())
            assert code == "ok", code
            self._took_s.append(time.monotonic() - began_s)


async def ask(to: Served, seeds: Iterable[int], rows: int = ROWS, found: Found | None = None) -> Found:
    """The bodies of these seeds, as many at once as there are rows, and good ones among them."""
    found = Found() if found is None else found
    bodies, left = Bodies(to.description), iter(seeds)

    def passes(call: EngineCall) -> None:
        fields = {name for name, value in json.loads(call.body).items() if value is not None}
        found.passed.update(fields)
        if unknown := fields - ENDPOINTS[call.path].fields.keys():
            raise AssertionError(f"fields that the table does not name reached the worker: {unknown}")

    to.on_call = passes

    async def one_after_the_other() -> None:
        for seed in left:
            if seed % GOOD_EVERY == 0:
                await _look(to, found, seed, PATHS[0], GOOD)
            await _look(to, found, seed, *bodies.draw(seed))

    await asyncio.gather(*(one_after_the_other() for _ in range(rows)))
    await _look(to, found, NO_SEED, PATHS[0], GOOD)
    if to.worker.engine.failed:
        found.broken.append({"seed": NO_SEED, "what": "the engine ended"})
    return found


GOOD = json.dumps({"model": "base", "prompt": "hello there", "max_tokens": 2, "ignore_eos": True}).encode()


async def _look(to: Served, found: Found, seed: int, path: str, raw: bytes) -> None:
    began_s = time.monotonic()
    try:
        async with asyncio.timeout(WAIT_S):
            code = await to.asked(path, raw)
        if raw is GOOD and code != "ok":
            raise AssertionError(f"a good request ended with {code}")
        if raw is not GOOD:
            found.codes[code] += 1
    except Exception as e:
        found.broken.append(
            {"seed": seed, "path": path, "body": raw[:2_000].decode(errors="replace"), "what": repr(e)}
        )
    if (took_s := time.monotonic() - began_s) > found.slowest_s:
        found.slowest_s, found.slowest_seed = took_s, seed
