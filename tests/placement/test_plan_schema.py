"""The fields of a what-if file, and its refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic.alias_generators import to_camel

from placement.solver.memory import figures_lines, rank_bytes
from placement.solver.plan import Shape
from placement.solver.schema import ScenarioError, read_scenario
from placement.types import Intent, Scope
from testkit.known_models import llama_config

GIB = 2**30
MODEL = {
    "layers": 4,
    "heads": 8,
    "kv_heads": 4,
    "hidden_size": 512,
    "layer_mib": 100,
    "kv_bytes_per_token_per_layer": 2048,
}
LLAMA = llama_config(6, 64, 4, 2, 128, 128, max_position_embeddings=256)


def document(**gpu: Any) -> dict[str, Any]:
    return {
        "cluster": {
            "nodes": [
                {
                    "name": "a",
                    "gpus": [{"type": "A6000", "count": 4, "total_gib": 48, **gpu}],
                    "links": [[0, 1]],
                }
            ]
        },
        "deployments": [{"name": "m", "model": dict(MODEL)}],
    }


def test_names_may_be_written_as_the_api_writes_them() -> None:
    def camel(value: Any) -> Any:
        if isinstance(value, dict):
            return {to_camel(key): camel(entry) for key, entry in value.items()}
        return [camel(entry) for entry in value] if isinstance(value, list) else value

    asked = document(free_gib=40)
    asked["deployments"][0] |= {"anti_affinity": "gpu", "rate_per_s": 2.5}
    assert read_scenario(camel(asked), Path()) == read_scenario(asked, Path())


def test_a_file_becomes_a_cluster_and_requests() -> None:
    asked = document(free_gib=40, load=0.25)
    asked["deployments"][0] |= {
        "copies": 2,
        "intent": "minLat",
        "slos": {"accuracy": 0.8},
        "anti_affinity": "gpu",
        "rate_per_s": 2.5,
    }
    asked["deployments"][0]["model"]["compressions"] = {"int4": {"accuracy": 0.85, "share": 0.25}}
    cluster, requests = read_scenario(asked, Path())
    gpus = cluster.nodes[0].gpus
    assert [gpu.index for gpu in gpus] == [0, 1, 2, 3]
    assert gpus[0].nvlink_domain == gpus[1].nvlink_domain
    assert len({gpu.nvlink_domain for gpu in gpus}) == 3
    assert (gpus[3].total_bytes, gpus[3].free_bytes, gpus[3].load) == (48 * GIB, 40 * GIB, 0.25)
    assert [request.name for request in requests] == ["m-1", "m-2"]
    first = requests[0]
    assert (first.intent, first.scope, first.group) == (Intent.MIN_LATENCY, Scope.GPU, "m")
    assert first.model.compressions[0].layer_bytes == 25 * 2**20


def test_a_model_may_be_a_config(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    asked = document()
    asked["deployments"][0]["model"] = {"config": "."}
    _, (request,) = read_scenario(asked, tmp_path)
    attention, mlp, norms = 64 * 64 * 2 + 64 * 32 * 2, 3 * 64 * 128, 2 * 64
    assert request.model.layers == 6
    assert request.model.compressions[0].layer_bytes == 2 * (attention + mlp + norms)
    assert request.model.compressions[0].kv_bytes_per_token == 2 * 2 * 16 * 2
    assert request.model.embedding_bytes == 128 * 64 * 2


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("everywhere", [False, True])
def test_tables_of_a_model_may_lie_on_every_stage(tied: bool, everywhere: bool) -> None:
    asked = document()
    asked["deployments"][0]["model"] |= {
        "embedding_mib": 30,
        "head_mib": 30,
        "overhead_mib": 100,
        "tied": tied,
        "tables_everywhere": everywhere,
    }
    _, (request,) = read_scenario(asked, Path())
    shape = Shape(request.model.compressions[0], 1, 3)
    held = [rank_bytes(figures_lines(request, shape, stage), 0) / 2**20 for stage in range(3)]
    copies = (1 if tied else 2,) * 3 if everywhere else (1, 0, 1)
    assert held == [100 + 30 * n for n in copies]


def put(asked: dict[str, Any], path: str, value: object) -> None:
    *way, last = path.split(".")
    at: Any = asked
    for step in way:
        at = at[int(step)] if step.isdigit() else at[step]
    at[last] = value


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("cluster.nodes.0.gpus.0.type", "B300", "unknown GPU type B300.*give the type's memory_gb_per_s"),
        ("cluster.nodes.0.gpus.0.free_gib", 50, r"expected free_gib of at most total_gib \(48\), got 50"),
        ("cluster.nodes.0.gpus.0.free_gib", -1, "greater than or equal to 0"),
        ("cluster.nodes.0.gpus.0.total_gib", 0, "total_gib: .*greater than or equal to 0.001"),
        ("cluster.nodes.0.gpus.0.load", 2, "less than or equal to 1"),
        ("cluster.nodes.0.links", [[0, 4]], "expected indices 0 to 3, each once"),
        ("cluster.nodes.0.links", [[0, 1], [1, 2]], "each once"),
        ("cluster.nodes", [], "at least 1"),
        (
            "cluster.links",
            {"fast_gb_per_s": 1},
            "fast_gb_per_s >= node_gb_per_s >= network_gb_per_s, got 1, 25",
        ),
        ("deployments.0.model.layers", 0, "deployments.0.model.layers: .*greater than or equal to 1"),
        ("deployments.0.model.layer_mib", -5, "layer_mib: .*greater than or equal to 0.001"),
        ("deployments.0.model.kv_heads", 3, "8 heads for 3 KV heads"),
        ("deployments.0.model", {"layers": 3}, "got figures without heads"),
        ("deployments.0.model.config", "x", "got both"),
        ("deployments.0.model", {"config": "nowhere"}, "expected a config.json at"),
        ("deployments.0.intent", "cheapest", "minCost"),
        ("deployments.0.headroom", 1, "less than 1"),
        ("deployments.0.slo", {}, "Extra inputs"),
        ("deployments", [], "at least 1"),
        ("deployments.0.model.layers", True, "^deployments.0.model.layers: expected a number, got true$"),
        ("deployments.0.concurrency", 10**21, "^deployments.0.concurrency: .*less than or equal to 1000000$"),
        (
            "deployments.0.model.layer_mib",
            float("inf"),
            "^deployments.0.model.layer_mib: .*less than or equal",
        ),
        (
            "cluster.nodes.0.gpus.0.total_gib",
            1e300,
            "^cluster.nodes.0.gpus.0.total_gib: .*less than or equal",
        ),
        (
            "cluster.nodes.0.gpus.0.count",
            10**9,
            "^cluster.nodes.0.gpus.0.count: .*less than or equal to 100000$",
        ),
        ("deployments.0.copies", 10**9, "^deployments.0.copies: .*less than or equal to 10000$"),
    ],
)
def test_an_impossible_value_is_refused_by_name(path: str, value: object, message: str) -> None:
    asked = document()
    put(asked, path, value)
    with pytest.raises(ScenarioError, match=message):
        read_scenario(asked, Path())


def test_names_are_unique() -> None:
    asked = document()
    asked["deployments"].append({"name": "m", "model": dict(MODEL)})
    with pytest.raises(ScenarioError, match="m is named twice"):
        read_scenario(asked, Path())


@pytest.mark.parametrize(("nothing", "got"), [(None, "nothing"), ([], "list"), ("text", "str")])
def test_an_invalid_scenario_is_refused(nothing: object, got: str) -> None:
    with pytest.raises(ScenarioError, match=f"^expected cluster and deployments, got {got}$"):
        read_scenario(nothing, Path())


def test_an_invalid_model_is_refused() -> None:
    asked = document()
    asked["deployments"][0]["model"] = 3
    with pytest.raises(ScenarioError, match=r"^deployments\.0\.model: expected its fields, got int$"):
        read_scenario(asked, Path())


def test_the_first_of_many_mistakes_are_named() -> None:
    asked = document()
    put(asked, "cluster.nodes.0.links", [[9]] * 1000)
    with pytest.raises(ScenarioError, match=r"got \[9\], .*\[9\], 992 more$") as raised:
        read_scenario(asked, Path())
    assert len(str(raised.value)) < 200
    asked["deployments"] = [{"name": f"m{n}", "model": 3} for n in range(1000)]
    with pytest.raises(ScenarioError, match=r"deployments\.7\.model: .*, and 992 more$"):
        read_scenario(asked, Path())
