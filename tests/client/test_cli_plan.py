"""`ostinato plan` on files, without a server."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from controlplane.cli import main as cli_main
from testkit.known_models import llama_config

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


def test_the_sizes_of_a_model_with_a_config_are_chosen_and_told(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """16 requests of 2,048 tokens are usual; what was asked for is kept."""
    (tmp_path / "config.json").write_text(
        json.dumps(llama_config(12, 1024, 16, 4, 2816, 32000, max_position_embeddings=8192))
    )
    path = tmp_path / "scenario.yaml"
    path.write_text(
        """
        cluster: {nodes: [{name: a, gpus: [{type: H200, total_gib: 140}]}]}
        deployments:
          - {name: chosen, model: {config: .}, intent: minMem}
          - {name: asked, model: {config: .}, context: 1000, concurrency: 3, lora_rank: 8, slots: 2}
          - {name: long, model: {config: .}, context: 8192, concurrency: 100000}
        """
    )
    assert cli_main.run(["plan", str(path), "--json"]) == 0
    document = json.loads(capfd.readouterr().out)
    chosen, asked = (placed["sizes"] for placed in document["placed"])
    assert (chosen["contextTokens"], chosen["requestsAtOnce"], chosen["cachedTokens"]) == (8192, 16, 32768)
    assert (chosen["variantSlots"], chosen["loraRank"]) == (8, 64)
    assert (asked["contextTokens"], asked["requestsAtOnce"]) == (1000, 3)
    assert (asked["variantSlots"], asked["loraRank"]) == (2, 8)
    assert [missed["deployment"] for missed in document["notPlaced"]] == ["long"]
    assert cli_main.run(["plan", str(path)]) == 0
    assert f"chosen: {chosen['why']}" in capfd.readouterr().out


@pytest.mark.parametrize("sizes", ["context: 100", "variants: [{rank: 8}]", "slots: 3"])
def test_sizes_belong_to_a_model_with_a_config(
    scenario: Path, capfd: pytest.CaptureFixture[str], sizes: str
) -> None:
    scenario.write_text(SCENARIO.replace("max_tp: 1", sizes))
    assert cli_main.run(["plan", str(scenario)]) != 0
    assert f"expected model.config, which {sizes.partition(':')[0]} needs" in capfd.readouterr().err
