"""The shared parts of tests of real clusters: a model and its adapters, and the order of the folders.

Each folder has one cluster, which ends with the folder's last test: vLLM with a small model, vLLM with all of
SmolLM2, and one that echoes. In `own_nodes` each test starts what it needs.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from testkit import random_adapters
from testkit.cluster import small_models
from testkit.cluster.served import BASE, LAYERS, LORAS, TOKENS
from testkit.random_adapters import RandomLora
from tests.side_by_side import place_of, unit_of

ORDER = ("vllm_engine", "own_nodes", "whole_model", "echo_engine")  # in one process, after all other tests
SHARED = {"cluster", "echo_cluster", "whole"}
# They kill processes, or leave an engine of another name.
LAST = ("test_chaos.py", "test_engine_killed.py", "test_room_for_variants.py")
TESTS = Path(__file__).parents[1]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """In one process, tests of clusters come last. In several processes, long units come first.

    In each folder, tests without its cluster come first, and tests that kill processes come last.
    """
    side_by_side = hasattr(config, "workerinput")

    def order(item: pytest.Item) -> tuple[int, bool, bool]:
        folder = item.path.parent.relative_to(TESTS).parts
        if folder[:1] != ("cluster",):
            return place_of(unit_of(item.nodeid)) if side_by_side else 0, False, False
        alone = 1 + (ORDER.index(folder[-1]) if folder[-1] in ORDER else len(ORDER))
        place = place_of(unit_of(item.nodeid)) if side_by_side else alone
        shares = not SHARED.isdisjoint(getattr(item, "fixturenames", ()))
        return place, shares, item.path.name in LAST

    items.sort(key=order)


@pytest.fixture(scope="session")
def base_folder(smollm2_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SmolLM2's first layers and tokens: what they say makes no sense, but they start and answer in less
    time. They know tools."""
    made = small_models.first_layers(smollm2_folder, tmp_path_factory.mktemp("base") / BASE, LAYERS)
    return small_models.showing_tools(small_models.fewer_tokens(made, TOKENS))


@pytest.fixture(scope="session")
def adapters(base_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Adapter folders by name: those that are served, and `spare`, which is not."""
    loras = (*LORAS, RandomLora("spare", rank=8, seed=13))
    folder = tmp_path_factory.mktemp("adapters")
    return {lora.name: random_adapters.write(base_folder, folder / lora.name, lora) for lora in loras}
