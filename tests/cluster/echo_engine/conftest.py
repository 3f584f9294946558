"""One cluster for the tests of this folder: engines that echo."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from testkit.cluster import ways_in
from testkit.cluster.clusters import Cluster
from testkit.cluster.served import roots, serving


@pytest.fixture(scope="package")
def echo_cluster(base_folder: Path, adapters: dict[str, Path]) -> Iterator[Cluster]:
    """Two of its engines find room on two cores."""
    made = Cluster(
        "echo",
        roots(base_folder, adapters),
        dashboard=True,
        cors_origins=ways_in.PAGE,
    )
    yield from serving(made, base_folder, adapters)
