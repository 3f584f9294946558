"""`ostinato plan` on files, without a server."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from controlplane.cli import main as cli_main

SCENARIO = """
cluster:
  nodes:
    - name: a
      gpus: [{type: A6000, total_gib: 48, free_gib: 9}, {type: A6000, total_gib: 48, free_gib: 12}]
deployments:
  - name: chat
    model: &model
      {layers: 32, heads: 32, kv_heads: 8, hidden_size: 4096, layer_mib: 400,
       kv_bytes_per_token_per_layer: 4096}
    max_tp: 1
  - {name: code, model: *model, rate_per_s: 0.5, slos: {latency_s: 60}}
"""


@pytest.fixture
def scenario(tmp_path: Path) -> Path:
    path = tmp_path / "scenario.yaml"
    path.write_text(SCENARIO)
    return path


def test_json_has_every_field(scenario: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert cli_main.run(["plan", str(scenario), "--json"]) == 0
    document = json.loads(capfd.readouterr().out)
    (chat,) = document["placed"]
    assert sum(chat["layersPerStage"]) == 32
    assert [(rank["gpu"], rank["layerEnd"] - rank["layerStart"]) for rank in chat["ranks"]] == list(
        zip((rank["gpu"] for rank in chat["ranks"]), chat["layersPerStage"], strict=True)
    )
    (code,) = document["notPlaced"]
    assert (code["deployment"], code["binding"]) == ("code", "memory")
    assert document["gpus"][0]["residents"][0]["deployment"] == "chat"
    assert [gpu["island"] for gpu in document["gpus"]] == [0, 1]
    assert not [key for key in keys_of(document) if "_" in key]


def keys_of(value: Any) -> Iterator[str]:
    """The names of all objects in a JSON document."""
    if isinstance(value, dict):
        yield from value
    for entry in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from keys_of(entry)


def test_plan_writes_tables_and_a_picture(
    scenario: Path, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    picture = tmp_path / "cluster.png"
    assert cli_main.run(["plan", str(scenario), "--policy", "maveriq", "--plot", str(picture)]) == 0
    out = capfd.readouterr().out
    for word in ("DEPLOYMENT", "a:0", "chat[0:", "code does not fit: memory"):
        assert word in out
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_an_invalid_scenario_is_refused(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "bad.yaml"
    for text, said in (("a: [", "expected a YAML file"), ("cluster: 3", "deployments: Field required")):
        path.write_text(text)
        assert cli_main.run(["plan", str(path)]) != 0
        assert said in capfd.readouterr().err
    assert cli_main.run(["plan", str(tmp_path / "none.yaml")]) != 0
