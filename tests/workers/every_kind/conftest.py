"""One engine for each way to split the model, for all tests of this folder that need no other."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from testkit.workers.variant_lab import LAYERS, Checkpoints, Lab, engine_config, running

PLANS = {
    "one process": (1, (LAYERS,)),
    "two stages": (1, (1, LAYERS - 1)),
    "three-way tensors": (3, (LAYERS,)),
}


@pytest.fixture(scope="package")
def lab(request: pytest.FixtureRequest, checkpoints: Checkpoints) -> Iterator[Lab]:
    """The name of a plan selects the lab: `pytest.mark.parametrize("lab", [...], indirect=True)`."""
    with running(checkpoints, engine_config(checkpoints.base, *PLANS[request.param])) as lab:
        yield lab
