"""One cluster for the tests of this folder: vLLM with a small model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from testkit.cluster.clusters import Cluster
from testkit.cluster.served import openai_client, roots, serving
from testkit.random_variants import RandomDelta, write_delta


@pytest.fixture(scope="package")
def cluster(base_folder: Path, adapters: dict[str, Path]) -> Iterator[Cluster]:
    yield from serving(Cluster("vllm", roots(base_folder, adapters)), base_folder, adapters)


@pytest.fixture(scope="package")
def client(cluster: Cluster) -> Iterator[openai.OpenAI]:
    yield from openai_client(cluster)


@pytest.fixture(scope="package")
def large_delta(base_folder: Path, adapters: dict[str, Path]) -> Path:
    """Its embedding is larger than all LoRAs that the engine set memory aside for."""
    return write_delta(base_folder, adapters["spare"].parent / "large", RandomDelta("large", 4))
