"""Two real clusters for the session: one serves SmolLM2 and two LoRA variants with vLLM, one echoes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest
import random_adapters
from clusters import Cluster
from random_adapters import ATTENTION, RandomLora

BASE = "smol"
MAX_OUTPUT = 512
LORAS = (
    RandomLora("forte", rank=4, seed=11),
    RandomLora("piano", rank=16, seed=12, modules=ATTENTION, strength=0.25),
)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Clusters live to the end of the session and take their share of the cores all the time: their tests
    come last, or all of them first in a process of their own. Those of the second cluster come after those of
    the first, and what kills processes last in each.
    """
    side_by_side = hasattr(config, "workerinput")

    def order(item: pytest.Item) -> tuple[bool, bool, bool]:
        here = Path(__file__).parent in item.path.parents
        echo = "echo_cluster" in getattr(item, "fixturenames", ())
        return here is not side_by_side, here and echo, item.path.name == "test_chaos.py"

    items.sort(key=order)


@pytest.fixture(scope="session")
def base_folder(smollm2_folder: Path) -> Path:
    return smollm2_folder


@pytest.fixture(scope="session")
def adapters(base_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Adapter folders by name: those that are served, and `spare`, which is not."""
    loras = (*LORAS, RandomLora("spare", rank=8, seed=13))
    folder = tmp_path_factory.mktemp("adapters")
    return {lora.name: random_adapters.write(base_folder, folder / lora.name, lora) for lora in loras}


def _roots(base_folder: Path, adapters: dict[str, Path]) -> str:
    return f"{base_folder.parent}:{adapters['spare'].parent}"


def _run(cluster: Cluster, base_folder: Path, adapters: dict[str, Path]) -> Iterator[Cluster]:
    try:
        print(f"\n{cluster.settings.engine} cluster up in {cluster.up():.1f} s")
        started = time.monotonic()
        cluster.serve_base(BASE, str(base_folder), MAX_OUTPUT)
        print(f"base registered and deployed in {time.monotonic() - started:.1f} s")
        for lora in LORAS:
            started = time.monotonic()
            cluster.serve_variant(lora.name, BASE, adapters[lora.name], MAX_OUTPUT)
            print(f"variant {lora.name} registered and deployed in {time.monotonic() - started:.1f} s")
        yield cluster
        print(f"\n{cluster.settings.engine} cluster down in {cluster.down():.1f} s, no process left")
    finally:
        cluster.discard()


@pytest.fixture(scope="session")
def cluster(base_folder: Path, adapters: dict[str, Path]) -> Iterator[Cluster]:
    yield from _run(Cluster("vllm", _roots(base_folder, adapters)), base_folder, adapters)


@pytest.fixture(scope="session")
def echo_cluster(base_folder: Path, adapters: dict[str, Path]) -> Iterator[Cluster]:
    """Two of its engines find room on two cores."""
    made = Cluster("echo", _roots(base_folder, adapters), engine_num_cpus=0.5)
    yield from _run(made, base_folder, adapters)


@pytest.fixture(scope="session")
def client(cluster: Cluster) -> Iterator[openai.OpenAI]:
    """The official client, as anybody would make it."""
    http = httpx.Client(trust_env=False)
    with openai.OpenAI(
        base_url=f"{cluster.url}/v1", api_key="unused", max_retries=0, timeout=120, http_client=http
    ) as made:
        yield made
