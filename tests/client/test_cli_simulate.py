"""`ostinato simulate` on files, without a server."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from controlplane.cli import main as cli_main

SCENARIO = """
name: one group
cluster:
  groups:
    - {count: 1, kvTokens: 2000, maxRows: 4, steps: {baseMs: 20, promptTokenMs: 0.1}}
traffic:
  rates: [2, 5]
  promptTokens: {mean: 50}
  outputTokens: {kind: geometric, mean: 5, most: 50}
classes: [{ttftMs: 500, tpotMs: 40}]
horizonS: 20
seeds: 2
"""


@pytest.fixture
def scenario(tmp_path: Path) -> Path:
    path = tmp_path / "scenario.yaml"
    path.write_text(SCENARIO)
    return path


def test_json_has_every_field(scenario: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert cli_main.run(["simulate", str(scenario), "--json", "--policy", "random", "--seeds", "3"]) == 0
    first = capfd.readouterr().out
    document = json.loads(first)
    assert document["seeds"] == 3
    assert [(r["policy"], r["ratePerS"]) for r in document["results"]] == [("random", 2), ("random", 5)]
    assert cli_main.run(["simulate", str(scenario), "--json", "--policy", "random", "--seeds", "3"]) == 0
    assert capfd.readouterr().out == first


def test_a_table_and_a_picture(scenario: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "rates.png"
    assert cli_main.run(["simulate", str(scenario), "--plot", str(picture)]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    header, *rows = capfd.readouterr().out.splitlines()
    assert "ATTAINMENT" in header
    assert [row.split()[:2] for row in rows[:2]] == [["least-harm", "2/s"], ["least-harm", "5/s"]]


def test_simulate_finds_the_fewest_groups(scenario: Path, capfd: pytest.CaptureFixture[str]) -> None:
    scenario.write_text(SCENARIO.replace("rates: [2, 5]", "ratePerS: 100"))
    assert cli_main.run(["simulate", str(scenario), "--for-slo", "0.9"]) == 0
    said = capfd.readouterr().out
    assert said.startswith("least-harm at 100/s: ")
    assert "groups keep 90%" in said
    assert "with one less" in said


@pytest.mark.parametrize(
    ("change", "argv", "said"),
    [
        ({"count: 1": "count: none"}, [], "cluster.groups.0.count"),
        ({}, ["--policy", "fastest"], "policies: expected any of least-harm"),
        ({"rates: [2, 5]": "arrivals: trace\n  file: none.csv"}, [], "traffic.file: expected a trace"),
        ({"name: one group": "name: [", "traffic": "x"}, [], "expected a YAML file"),
    ],
)
def test_a_mistake_is_reported(
    scenario: Path, change: dict[str, str], argv: list[str], said: str, capfd: pytest.CaptureFixture[str]
) -> None:
    text = SCENARIO
    for old, new in change.items():
        text = text.replace(old, new)
    scenario.write_text(text)
    assert cli_main.run(["simulate", str(scenario), *argv]) == 1
    errors = capfd.readouterr().err
    assert said in errors
    assert "docs/simulation.md" in errors


def test_a_plot_needs_rates(scenario: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    scenario.with_name("trace.csv").write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.97,48,10\n2023-11-16 18:17:04.0,9,8\n"
    )
    traffic = "traffic: {arrivals: trace, file: trace.csv}\n"
    scenario.write_text(SCENARIO[: SCENARIO.index("traffic:")] + traffic)
    assert cli_main.run(["simulate", str(scenario), "--plot", str(tmp_path / "a.png")]) == 1
    assert "rates" in capfd.readouterr().err


CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "num_hidden_layers": 12,
    "vocab_size": 32000,
    "max_position_embeddings": 8192,
    "torch_dtype": "bfloat16",
}


def answer(command: str, path: Path, file: dict[str, Any], capfd: pytest.CaptureFixture[str]) -> Any:
    path.write_text(json.dumps(file))
    assert cli_main.run([command, str(path), "--json"]) == 0, capfd.readouterr().err
    return json.loads(capfd.readouterr().out)


@pytest.mark.parametrize(
    ("groups", "asked"), [({}, {}), ({"maxRows": 12}, {"concurrency": 12}), ({"slots": 9}, {"slots": 9})]
)
def test_sizes_that_are_left_out_are_those_of_a_plan(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], groups: dict[str, Any], asked: dict[str, Any]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    estimate = {"config": ".", "gpu": "L4", "memoryGib": 10, "intent": "minLat", "inputTokens": 64}
    scenario = {
        "cluster": {"groups": [{"count": 1, "estimate": estimate, **groups}]},
        "variants": [{"kind": "lora", "count": 20, "ranks": [8, 128], "mibPerRank": 1}],
        "traffic": {"ratePerS": 1, "promptTokens": {"mean": 64}, "outputTokens": {"mean": 8}},
        "horizonS": 2,
        "seeds": 1,
    }
    plan = {
        "cluster": {"nodes": [{"name": "n", "gpus": [{"type": "L4", "total_gib": 10}]}]},
        "deployments": [
            {
                "name": "m",
                "model": {"config": "."},
                "intent": "minLat",
                "input_tokens": 64,
                "variants": [{"rank": 8, "count": 10}, {"rank": 128, "count": 10}],
                **asked,
            }
        ],
    }
    (engine,) = answer("simulate", tmp_path / "scenario.json", scenario, capfd)["engines"]
    ((sizes),) = [placed["sizes"] for placed in answer("plan", tmp_path / "p.json", plan, capfd)["placed"]]
    assert engine["why"] == sizes["why"]
    found = {"kvTokens": "cachedTokens", "maxRows": "requestsAtOnce", "slots": "variantSlots"}
    assert [engine[name] for name in found] == [sizes[name] for name in found.values()]
    assert "rank 128 for registered adapters" in engine["why"]
    assert cli_main.run(["simulate", str(tmp_path / "scenario.json")]) == 0
    assert capfd.readouterr().out.startswith(f"cluster.groups.0: {engine['why']}\n")


def test_an_engine_that_does_not_fit_is_refused(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    estimate = {"config": ".", "gpu": "L4", "memoryGib": 0.5}
    scenario = {
        "cluster": {"groups": [{"count": 1, "estimate": estimate}]},
        "traffic": {"ratePerS": 1, "promptTokens": {"mean": 64}, "outputTokens": {"mean": 8}},
    }
    (tmp_path / "scenario.json").write_text(json.dumps(scenario))
    assert cli_main.run(["simulate", str(tmp_path / "scenario.json")]) != 0
    said = capfd.readouterr().err
    assert "cluster.groups.0.estimate: memory: the smallest plan needs " in said
    assert "give it more memoryGib, or give kvTokens" in said
