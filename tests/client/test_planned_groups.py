"""The sizes that a scenario leaves out are those that `ostinato plan` chooses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from controlplane.cli.planned_groups import with_chosen_sizes
from controlplane.planning.what_if import what_if
from controlplane.settings import Settings
from controlplane.simulation.forms import ScenarioForm
from controlplane.simulation.reading import form_of
from placement.solver.schema import ScenarioError, read_form
from placement.types import Placement
from testkit.known_models import llama_config

SETTINGS = Settings(home=Path("/nowhere"))
CONFIG = llama_config(12, 1024, 16, 4, 2816, 32000, max_position_embeddings=8192)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path


def scenario(estimate: dict[str, Any], **groups: Any) -> ScenarioForm:
    wanted = {"config": ".", "gpu": "L4", "intent": "minLat", "inputTokens": 64, **estimate}
    return form_of(
        {
            "cluster": {"groups": [{"count": 1, "estimate": wanted, **groups}]},
            "variants": [
                {"kind": "lora", "count": 20, "ranks": [8, 128], "mibPerRank": 1},
                {"kind": "sparse_delta", "count": 2, "mib": 50},
            ],
            "traffic": {"ratePerS": 1, "promptTokens": {"mean": 64}, "outputTokens": {"mean": 8}},
        }
    )


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize(
    ("groups", "asked"), [({}, {}), ({"maxRows": 12}, {"concurrency": 12}), ({"slots": 9}, {"slots": 9})]
)
def test_sizes_that_are_left_out_are_those_of_a_plan(
    folder: Path, groups: dict[str, Any], asked: dict[str, Any], tp: int
) -> None:
    gpus = {"type": "L4", "count": tp, "total_gib": 10}
    deployment = {
        "name": "m",
        "model": {"config": "."},
        "intent": "minLat",
        "input_tokens": 64,
        "tp": [tp],
        "pp": [1],
        "variants": [
            {"rank": 8, "count": 10},
            {"rank": 128, "count": 10},
            {"kind": "sparse_delta", "mib": 50, "count": 2},
        ],
        **asked,
    }
    nodes = [{"name": "n", "gpus": [gpus], "links": [list(range(tp))]}]
    file = {"cluster": {"nodes": nodes}, "deployments": [deployment]}
    ((_, placed),) = what_if(read_form(file), folder, SETTINGS).outcomes
    assert isinstance(placed, Placement)
    form, (engine,) = with_chosen_sizes(
        scenario({"memoryGib": 10, "tensorParallel": tp}, **groups), folder, SETTINGS
    )
    (filled,) = form.cluster.groups
    plan = placed.plan
    assert (filled.cache_tokens, filled.max_rows, filled.slots) == (
        plan.kv_cache_tokens,
        plan.sequences,
        plan.max_variants,
    )
    assert engine == {
        "group": 0,
        "kvTokens": plan.kv_cache_tokens,
        "maxRows": plan.sequences,
        "slots": plan.max_variants,
        "why": placed.choice.sizes,
    }
    assert "rank 128 (for registered adapters)" in engine["why"]


def test_sizes_that_are_given_stay(folder: Path) -> None:
    given = scenario({}, kvTokens=5000)
    assert with_chosen_sizes(given, folder, SETTINGS) == (given, [])


def test_a_gpu_has_its_own_memory_by_default(folder: Path) -> None:
    """An L4 has 22.5 GiB."""
    chosen = [
        with_chosen_sizes(scenario(estimate), folder, SETTINGS)[1]
        for estimate in ({}, {"memoryGib": 22.5}, {"memoryGib": 3})
    ]
    assert chosen[0] == chosen[1]
    assert chosen[2][0]["kvTokens"] < chosen[0][0]["kvTokens"]


def test_an_engine_that_does_not_fit_is_refused(folder: Path) -> None:
    with pytest.raises(ScenarioError, match="memory: the smallest plan needs") as refused:
        with_chosen_sizes(scenario({"memoryGib": 0.5}), folder, SETTINGS)
    assert str(refused.value).startswith("cluster.groups.0.estimate: ")
    assert "give it more memoryGib, or give kvTokens" in str(refused.value)
