"""`ostinato simulate` on files, without a server."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from controlplane.cli import main as cli_main
from testkit.known_models import llama_config

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
    assert "groups reach 90%" in said
    assert "one group fewer reaches" in said


@pytest.mark.parametrize(
    ("change", "argv", "said"),
    [
        ({"count: 1": "count: none"}, [], "cluster.groups.0.count"),
        ({}, ["--policy", "fastest"], "policies: expected any of least-harm"),
        ({"rates: [2, 5]": "arrivals: trace\n  file: none.csv"}, [], "is not a valid trace"),
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


def test_the_sizes_of_an_estimated_engine_are_chosen_and_told(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(llama_config(2, 256, 4, 4, 512, 1000)))
    path = tmp_path / "scenario.yaml"
    steps = "kvTokens: 2000, maxRows: 4, steps: {baseMs: 20, promptTokenMs: 0.1}"
    path.write_text(SCENARIO.replace(steps, "estimate: {config: ., gpu: L4, intent: minMem}"))
    assert cli_main.run(["simulate", str(path), "--json"]) == 0
    (engine,) = json.loads(capfd.readouterr().out)["engines"]
    assert (engine["kvTokens"], engine["maxRows"]) == (16 * 2048, 16)
    assert cli_main.run(["simulate", str(path)]) == 0
    assert capfd.readouterr().out.startswith(f"cluster.groups.0: {engine['why']}\n")
