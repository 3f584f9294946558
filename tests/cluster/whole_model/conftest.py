"""One cluster for the tests of this folder: vLLM with all of SmolLM2 and the demo's adapters."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from testkit.cluster.clusters import Cluster
from testkit.cluster.served import BASE, MAX_OUTPUT, openai_client

DEMO_ADAPTERS = Path(__file__).parents[3] / "controlplane" / "demo" / "adapters"


@pytest.fixture(scope="package")
def whole(smollm2_folder: Path) -> Iterator[Cluster]:
    """One slot, two variants, and host memory that holds one of them."""
    roots = f"{smollm2_folder.parent}:{DEMO_ADAPTERS}"
    made = Cluster("vllm", roots, max_variants=1, variant_host_bytes=1 << 20, profile_seconds=0)
    try:
        made.up()
        made.serve_base(BASE, str(smollm2_folder), MAX_OUTPUT)
        for name in ("arithmetic", "kinship"):
            made.serve_variant(name, BASE, DEMO_ADAPTERS / name, MAX_OUTPUT)
        yield made
        made.down()
    finally:
        made.discard()


@pytest.fixture(scope="package")
def whole_client(whole: Cluster) -> Iterator[openai.OpenAI]:
    yield from openai_client(whole)
