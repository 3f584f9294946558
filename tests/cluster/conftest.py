"""Real clusters for the session, one for the tests of each folder: vLLM with a small model, vLLM with all of
SmolLM2, and one that echoes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest
import random_adapters
import small_models
from clusters import Cluster
from random_adapters import ATTENTION, RandomLora

BASE = "smol"
LAYERS = 6
MAX_OUTPUT = 512
DEMO_ADAPTERS = Path(__file__).parents[2] / "controlplane" / "demo" / "adapters"
FOLDERS = ("vllm_engine", "echo_engine", "whole_model")  # in the order in which they begin
LORAS = (
    RandomLora("forte", rank=4, seed=11),
    RandomLora("piano", rank=16, seed=12, modules=ATTENTION, strength=0.25),
)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Clusters live to the end of the session and take their share of the cores all the time: their tests
    come last, or, side by side with others, first: a process has those with vLLM's engines, which take
    longest, another those whose engines echo, one more those of the whole model. What kills processes comes
    last in each.
    """
    side_by_side = hasattr(config, "workerinput")

    def order(item: pytest.Item) -> tuple[bool, int, bool]:
        here = Path(__file__).parent in item.path.parents
        place = (*FOLDERS, "cluster").index(item.path.parent.name) if here else 0
        kills = item.path.name in ("test_chaos.py", "test_engine_killed.py")
        return here is not side_by_side, place, here and kills

    items.sort(key=order)


@pytest.fixture(scope="session")
def base_folder(smollm2_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SmolLM2's first layers: what they say makes no sense, but they start and answer in less time."""
    return small_models.first_layers(smollm2_folder, tmp_path_factory.mktemp("base") / BASE, LAYERS)


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
def whole(smollm2_folder: Path) -> Iterator[Cluster]:
    """All of SmolLM2, with one slot, two variants, and host memory that holds one of them."""
    roots = f"{smollm2_folder.parent}:{DEMO_ADAPTERS}"
    made = Cluster("vllm", roots, max_variants=1, variant_host_bytes=1 << 20, profile=False)
    try:
        made.up()
        made.serve_base(BASE, str(smollm2_folder), MAX_OUTPUT)
        for name in ("arithmetic", "kinship"):
            made.serve_variant(name, BASE, DEMO_ADAPTERS / name, MAX_OUTPUT)
        yield made
        made.down()
    finally:
        made.discard()


@pytest.fixture(scope="session")
def client(cluster: Cluster) -> Iterator[openai.OpenAI]:
    yield from _client(cluster)


@pytest.fixture(scope="session")
def whole_client(whole: Cluster) -> Iterator[openai.OpenAI]:
    yield from _client(whole)


def _client(cluster: Cluster) -> Iterator[openai.OpenAI]:
    """The official client, as anybody would make it."""
    http = httpx.Client(trust_env=False)
    with openai.OpenAI(
        base_url=f"{cluster.url}/v1", api_key="unused", max_retries=0, timeout=120, http_client=http
    ) as made:
        yield made
