"""One cluster for the tests of this folder: vLLM with all of SmolLM2, the demo's adapters, and two tenants.
The tokens of one tenant are limited."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest

from testkit.api import tenants
from testkit.cluster.clusters import Cluster
from testkit.cluster.served import BASE, MAX_OUTPUT, openai_client

DEMO_ADAPTERS = Path(__file__).parents[3] / "controlplane" / "demo" / "adapters"


LIMITED, OTHER = "limited", "other"
TOKENS_PER_MINUTE = 3 * MAX_OUTPUT // 2


@pytest.fixture(scope="package")
def whole(smollm2_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """One slot, two variants, and host memory that holds one of them."""
    file = tmp_path_factory.mktemp("tenants") / "tenants.json"
    tenants.write(file, tenants.entry(LIMITED, tokensPerMinute=TOKENS_PER_MINUTE), tenants.entry(OTHER))
    made = Cluster(
        "vllm",
        f"{smollm2_folder.parent}:{DEMO_ADAPTERS}",
        max_variants=1,
        variant_host_bytes=1 << 20,
        profile_seconds=0,
        api_key=tenants.OWN_KEY,
        tenants=str(file),
    )
    environment = pytest.MonkeyPatch()
    environment.setenv("OSTINATO_API_KEY", tenants.OWN_KEY)  # for the commands that are tested
    try:
        made.up()
        made.serve_base(BASE, str(smollm2_folder), MAX_OUTPUT)
        for name in ("arithmetic", "kinship"):
            made.serve_variant(name, BASE, DEMO_ADAPTERS / name, MAX_OUTPUT)
        yield made
        made.down()
    finally:
        environment.undo()
        made.discard()


@pytest.fixture(scope="package")
def whole_client(whole: Cluster) -> Iterator[openai.OpenAI]:
    yield from openai_client(whole)


@pytest.fixture(scope="package")
def limited(whole: Cluster) -> Iterator[httpx.Client]:
    """A client of the tenant with limited tokens."""
    with whole.client(tenants.key_of(LIMITED)) as client:
        yield client


@pytest.fixture(scope="package")
def other(whole: Cluster) -> Iterator[httpx.Client]:
    """A client of the tenant without limits."""
    with whole.client(tenants.key_of(OTHER)) as client:
        yield client
