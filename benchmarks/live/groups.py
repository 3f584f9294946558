"""A local cluster in which worker groups serve a random base and LoRAs of it of several ranks."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, cast

import psutil

from benchmarks import gpu_lora, gpu_variants, rehearsing
from benchmarks.gpu_engine import write_tokenizer
from benchmarks.serving.settings import SHAPES
from controlplane.client.client import Client
from controlplane.management.schemas.deploy import AntiAffinity, DeployModelRequest, EngineForm, Replicas
from controlplane.management.schemas.models import RegisterModelRequest
from controlplane.runtime import local
from controlplane.settings import Settings

BASE = "base"
# 33 million parameters in float32: a step takes a core long enough for the path to be small compared with it.
SHAPE = {
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 6,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 8192,
}
SERVING = "Serving"
WAIT_S = 600.0
LONGEST_WORD = 16  # characters; it is in no prompt


@dataclass(frozen=True)
class Served:
    """How it is served: `rows` requests at once in each of `groups` engines, `slots` for variants of these
    `ranks`; `profile_s` 0: nothing is measured. `apart`: no two groups on one node."""

    engine: str = "vllm"
    groups: int = 2
    ranks: tuple[int, ...] = (8, 16, 32, 64)
    rows: int = 8
    slots: int = 8
    max_model_len: int = 512
    max_output: int = 96  # the longest answers that any benchmark of these asks for
    profile_s: float = 300.0
    echo_tpot_s: float = 0.0  # of engines that echo
    apart: bool = False


@dataclass(frozen=True)
class Running:
    cluster: local.LocalCluster
    client: Client
    served: Served
    vocabulary: int
    api_key: str = ""
    urls: tuple[str, ...] = ()  # of the API, where there are several; the first is the cluster's

    @property
    def headers(self) -> dict[str, str]:
        """The fields that each request must bring."""
        return {"authorization": f"Bearer {self.api_key}"} if self.api_key else {}

    @property
    def models(self) -> tuple[str, ...]:
        """The base, and then its variants."""
        return (BASE, *names(self.served.ranks))

    def processes(self) -> list[psutil.Process]:
        """All of the cluster: those that carry its mark, and their descendants."""
        found: set[psutil.Process] = set()
        for process in psutil.process_iter():
            try:
                if process.environ().get(local.MARK) == self.cluster.mark:
                    found |= {process, *process.children(recursive=True)}
            except psutil.Error:
                continue
        return sorted(found - {psutil.Process()}, key=lambda process: process.pid)

    def engine_pids(self) -> tuple[int, ...]:
        """The memory of the workers of the base's groups, as the API reports it; workers that do not answer
        are left out."""
        return tuple(engine.pid for engine in self.client.deployment(BASE).residency or ())


def names(ranks: Sequence[int]) -> tuple[str, ...]:
    return tuple(f"lora{number}-r{rank}" for number, rank in enumerate(ranks, start=1))


class Site(Protocol):
    """Where a cluster is started: this machine (`controlplane.runtime.local`), or hosts of their own."""

    def up(self, settings: Settings, progress: Callable[[str], None]) -> local.LocalCluster: ...

    def down(self, settings: Settings, progress: Callable[[str], None]) -> bool: ...


THIS_MACHINE = cast("Site", local)


@contextmanager
def serving(folder: Path, served: Served, site: Site = THIS_MACHINE, **settings: Any) -> Iterator[Running]:
    """Up with the base and all variants deployed; down afterwards. `folder` gets the files and the home."""
    shape = SHAPES["tiny"] if rehearsing.is_rehearsal() else SHAPE
    base = write_base(folder / "models", shape)
    adapters = [
        gpu_lora.write_adapter(folder / "adapters" / name, rank, number, shape)
        for number, (name, rank) in enumerate(zip(names(served.ranks), served.ranks, strict=True))
    ]
    chosen = {
        "home": folder / "home",
        "http_port": local.free_port(),
        "engine": f"{served.engine}:{served.echo_tpot_s}" if served.echo_tpot_s else served.engine,
        "allowed_roots": str(folder),
        "profile_seconds": served.profile_s,
        **settings,
    }
    configured = Settings.model_validate({**Settings().model_dump(), **chosen})
    try:
        cluster = site.up(configured, print)
        urls = getattr(site, "urls", ())
        with Client(cluster.url, configured.api_key or None) as client:
            running = Running(cluster, client, served, shape["vocab_size"] - 1, configured.api_key, urls)
            _deploy(running, base, adapters)
            yield running
    finally:
        site.down(configured, print)


def _deploy(running: Running, base: Path, adapters: Sequence[Path]) -> None:
    client, served = running.client, running.served
    client.wait(client.register_model(RegisterModelRequest(model=BASE, source=str(base))).id)
    for name, adapter in zip(running.models[1:], adapters, strict=True):
        client.wait(
            client.register_model(RegisterModelRequest(model=name, base=BASE, adapter=str(adapter))).id
        )
    asked = DeployModelRequest(
        model=BASE,
        maxOutputLength=served.max_output,
        replicas=Replicas(min=served.groups, max=served.groups),
        antiAffinity=AntiAffinity(group="apart") if served.apart else None,
        engine=EngineForm(
            contextTokens=served.max_model_len,
            requestsAtOnce=served.rows,
            variantSlots=served.slots,
            loraRank=max(served.ranks),
        ),
    )
    client.wait(client.deploy_model(asked).id)
    for name in running.models[1:]:
        client.wait(client.deploy_model(DeployModelRequest(model=name, maxOutputLength=served.max_output)).id)
    wait_for(lambda: serving_groups(client) == served.groups, f"{served.groups} groups that serve")
    wait_for(lambda: len(running.engine_pids()) == served.groups, f"{served.groups} engines that answer")


def serving_groups(client: Client) -> int:
    return sum(group.phase == SERVING for group in client.deployment(BASE).groups)


def wait_for(check: Callable[[], bool], what: str, limit_s: float = WAIT_S) -> None:
    """Raises TimeoutError."""
    deadline = time.monotonic() + limit_s
    while not check():
        if time.monotonic() > deadline:
            raise TimeoutError(f"expected {what} within {limit_s:.0f} s; see the cluster's logs")
        time.sleep(0.5)


def write_base(folder: Path, shape: dict[str, int]) -> Path:
    """A random Llama whose tokenizer knows a word (w0, w1, ...) for each id: a word is a token."""
    base, last = gpu_variants.write_base(folder, shape), shape["vocab_size"] - 1
    path = base / "tokenizer.json"
    write_tokenizer(path, shape["vocab_size"])
    # vLLM refuses a prompt with more characters than its longest words would have, and counts no spaces.
    made = json.loads(path.read_text())
    words = made["model"]["vocab"]
    words["w" * LONGEST_WORD] = words.pop(f"w{last}")
    path.write_text(json.dumps(made))
    return base
