"""Groups of ranks on the real engine: each within its plan, answering what transformers answers, ended whole.

The first 9 layers of SmolLM2 in float32, with 9 heads and its frequent tokens: two stages of 3 and 6 layers,
started as on two nodes, and three ranks that share every layer.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from controlplane.runtime.follower_actors import rendezvous_at
from testkit import loops, random_adapters, started_worker
from testkit.cluster import small_models
from testkit.engine_configs import vllm_config
from workers.group import plan, processes
from workers.group.follower import Order
from workers.group.following import Following
from workers.group.journal import read
from workers.group.launch import FOLDER, Launch, LaunchError
from workers.messages import EngineConfig, RankConfig, VariantRef
from workers.server.worker import Worker

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

MIB = 2**20
LOOPBACK = "127.0.0.1"
TOKENS = 16
LAYERS = 9
VOCABULARY = 15_360  # three ranks share them
PROMPTS = ("The capital of France is", "Once upon a time, in a village by the sea, there lived")
KV_TOKENS = 4096
LAYER_BYTES = 4 * (2 * 576 * 576 + 2 * 576 * 192 + 3 * 576 * 1536)  # q and o, k and v, gate, up and down
LORA = random_adapters.RandomLora("forte", rank=4, seed=11)


def ranks(layers: Sequence[int], tensor_parallel: int, nodes: Sequence[str]) -> tuple[RankConfig, ...]:
    """Keys and values of KV_TOKENS tokens: 3 heads of 64, split over the ranks of a stage."""
    per_layer = KV_TOKENS * 2 * 3 // tensor_parallel * 64 * 4
    return tuple(
        RankConfig(count, 2048 * MIB, per_layer * count, 8 * MIB, node)
        for count, node in zip(layers, nodes, strict=True)
        for _ in range(tensor_parallel)
    )


def config_of(folder: Path, parts: tuple[RankConfig, ...], tensor_parallel: int = 1) -> EngineConfig:
    return vllm_config(folder, parts, tensor_parallel=tensor_parallel)


@pytest.fixture(scope="module")
def base(smollm2_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = small_models.first_layers(smollm2_folder, tmp_path_factory.mktemp("group") / "base", LAYERS)
    return small_models.fewer_tokens(made, VOCABULARY)


@dataclass
class Lab(started_worker.Lab):
    async def ask(self, prompt: str, variant: VariantRef | None = None, tokens: int = TOKENS) -> Any:
        name = variant.name if variant else "base"
        reply = await self.worker.call(started_worker.greedy(name, prompt, variant, max_tokens=tokens))
        return json.loads(reply.body)["choices"][0] if reply.status == 200 else reply


@pytest.fixture
def loop(own_environment: None) -> Iterator[asyncio.AbstractEventLoop]:
    with loops.in_a_thread() as made:
        yield made


@pytest.fixture
def adapter(base: Path, tmp_path: Path) -> VariantRef:
    return VariantRef(LORA.name, 1, str(random_adapters.write(base, tmp_path / LORA.name, LORA)))


def assert_greedy(model: torch.nn.Module, choice: Any) -> None:
    """Every token is the best of the reference's, or as good."""
    prompt, tokens = choice["prompt_token_ids"], choice["token_ids"]
    assert len(tokens) == TOKENS
    assert random_adapters.falls_short(model, prompt, tokens) < 1e-4, choice["text"]


class Traces:
    """The things that a test's launches could leave: processes, folders, and shared memory."""

    def __init__(self) -> None:
        self._seen: set[Path] = set()
        self._ended = threading.Event()
        self._before = processes.children()
        self._watching = threading.Thread(target=self._watch, daemon=True)
        self._watching.start()

    def _watch(self) -> None:
        while not self._ended.wait(0.25):
            for process in processes.children() - self._before:
                with contextlib.suppress(OSError):
                    self._note(Path(f"/proc/{process.pid}/maps").read_text())

    def _note(self, maps: str) -> None:
        self._seen |= {Path(name) for name in re.findall(r"/dev/shm/\S+", maps)}

    def end(self) -> None:
        self._ended.set()
        self._watching.join()

    def left(self) -> list[str]:
        self.end()
        assert self._seen, "nothing was shared: the test would show nothing"
        folders = Path("/tmp").glob(f"{FOLDER}{os.getpid()}-*")
        running = processes.children() - self._before
        shared = [path for path in self._seen if path.exists()]
        return [*(" ".join(p.cmdline()) for p in running), *map(str, [*folders, *shared])]


@pytest.fixture
def traces() -> Iterator[Traces]:
    made = Traces()
    yield made
    made.end()


def test_three_ranks_of_a_stage_keep_to_their_plan(
    base: Path, loop: asyncio.AbstractEventLoop, traces: Traces
) -> None:
    parts = ranks((LAYERS,), 3, ("",))
    lab = Lab(Worker(config_of(base, parts, 3), LOOPBACK), loop)
    try:
        lab.run(lab.worker.start())
        model = random_adapters.merged_model(base, None)
        for prompt in PROMPTS:
            assert_greedy(model, lab.run(lab.ask(prompt)))
        reports = lab.run(lab.worker.report()).ranks
        usable = [os.sched_getaffinity(report.pid) for report in reports]
    finally:
        lab.run(lab.worker.close())
    assert [(r.rank, r.layers, r.planned_bytes) for r in reports] == [
        (n, LAYERS, 2048 * MIB) for n in range(3)
    ]
    assert len({r.pid for r in reports}) == 3
    assert usable == [os.sched_getaffinity(0)] * 3, "engines of one host would be bound to the same cores"
    assert {r.kv_cache_bytes for r in reports} == {parts[0].kv_cache_bytes}
    for report in reports:
        assert LAYERS * LAYER_BYTES / 3 < report.weights_bytes < report.process_bytes < report.total_bytes
    assert traces.left() == []


def test_two_stages_as_on_two_nodes(
    base: Path, adapter: VariantRef, loop: asyncio.AbstractEventLoop, traces: Traces
) -> None:
    """3 and 6 layers; a variant reaches both; when one node's rank dies the engine ends, and says why."""
    meeting = rendezvous_at(LOOPBACK)
    config = config_of(base, ranks((3, 6), 1, ("a", "b")))
    launch = Launch(config, meeting)
    lab = Lab(Worker(config, LOOPBACK, launch), loop)
    following = Following(Order(config, 1, meeting, LOOPBACK))
    try:
        lab.run(lab.worker.start())
        model = random_adapters.merged_model(base, None)
        for prompt in PROMPTS:
            assert_greedy(model, lab.run(lab.ask(prompt)))
        assert_greedy(
            random_adapters.merged_model(base, Path(adapter.path)),
            lab.run(lab.ask(PROMPTS[0], adapter)),
        )
        first, second = lab.run(lab.worker.report()).ranks
        assert ((first.node, first.layers), (second.node, second.layers)) == (("a", 3), ("b", 6))
        assert psutil.Process(second.pid).ppid() == following.pid
        assert [r.kv_cache_bytes for r in (first, second)] == [r.kv_cache_bytes for r in config.ranks]
        grown = second.weights_bytes - first.weights_bytes
        assert grown > 3 * LAYER_BYTES, f"6 layers took {grown} bytes more than 3"
        _a_rank_dies(lab, following, second.pid)
    finally:
        following.close()
        lab.run(lab.worker.close())
    assert traces.left() == []


def _a_rank_dies(lab: Lab, following: Following, pid: int) -> None:
    """Under a request that would take minutes; what the replica does is done here."""
    long = asyncio.run_coroutine_threadsafe(lab.ask(PROMPTS[1], tokens=200), lab.loop)
    psutil.Process(pid).kill()
    reason = following.wait()
    assert reason == "rank 1 ended with exit code -9 while serving"
    lab.worker.abort(reason)
    assert long.result(90).status >= 500
    with pytest.raises(LaunchError, match="rank 1 ended with exit code -9"):
        lab.run(lab.worker.check_health())


def test_a_rank_without_its_planned_memory_fails_the_launch(
    base: Path,
    loop: asyncio.AbstractEventLoop,
    monkeypatch: pytest.MonkeyPatch,
    traces: Traces,
) -> None:
    monkeypatch.setattr(plan, "WAIT_S", 0.0)
    fits, other = ranks((3, 6), 1, ("here", "here"))
    config = config_of(base, (fits, replace(other, memory_bytes=10**15)))
    lab = Lab(Worker(config, LOOPBACK), loop)
    with pytest.raises(LaunchError) as refusal:
        lab.run(lab.worker.start())
    said = str(refusal.value)
    assert said.startswith("rank 1 failed while claiming its device: NoMemory: rank 1 needs 931322.57 GiB")
    assert "on cpu 0 of here, but only " in said
    assert traces.left() == []


def test_a_rank_that_is_killed_while_the_group_starts(
    base: Path, loop: asyncio.AbstractEventLoop, traces: Traces
) -> None:
    lab = Lab(Worker(config_of(base, ranks((3, 6), 1, ("", ""))), LOOPBACK), loop)
    starting = asyncio.run_coroutine_threadsafe(lab.worker.start(), loop)
    victim = _first_word_of(1, starting)
    psutil.Process(victim).kill()
    with pytest.raises(LaunchError, match=rf"rank 1 \(process {victim}\) ended without an error while"):
        starting.result(300)
    assert traces.left() == []


def _first_word_of(rank: int, starting: Any) -> int:
    """The pid of a rank, as soon as it writes its journal."""
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline and not starting.done():
        for folder in Path("/tmp").glob(f"{FOLDER}{os.getpid()}-*"):
            if (entry := read(folder).get(rank)) is not None:
                return entry.pid
        time.sleep(0.05)
    raise AssertionError("the rank never wrote a journal")
