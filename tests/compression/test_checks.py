"""Incompressible models are refused before the work starts, with figures."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from profiler.checkpoint import read_model
from profiler.errors import AdapterError, CheckpointError
from profiler.variants.reading import read_manifest
from profiler.variants.types import VariantLimits
from testkit import random_variants as make
from testkit.gemma3_models import write_gemma3
from testkit.random_adapters import RandomLora
from workers.compression import checks
from workers.compression.choose import MethodName, OptionError, Options
from workers.compression.from_recipe import artifact_of
from workers.compression.job import Job, compress
from workers.compression.methods.magnitude import magnitude
from workers.compression.recipe import CompressRequest, Recipe
from workers.compression.request import Request
from workers.compression.rope import rope_of
from workers.compression.run import run
from workers.compression.sources import Checkpoint


def refused(base: Path, tuned: Path, error: type[Exception], words: str) -> str:
    """The error's text; no file of the attempt is left."""
    out = tuned.parent / "delta"
    with pytest.raises(error, match=words) as caught:
        compress(Job(base, tuned, out, magnitude()))
    assert list(out.parent.glob("*delta*")) == []
    return str(caught.value)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (make.QWEN2, "architecture to be LlamaForCausalLM, got Qwen2ForCausalLM"),
        ({"num_hidden_layers": 3}, "number of layers to be 2, got 3"),
        ({"intermediate_size": 64}, r"up_proj.weight': \(48, 32\).*up_proj.weight': \(64, 32\)"),
        ({"vocab_size": 56}, "at least the base's 64 tokens, got 56"),
    ],
)
def test_another_model_is_no_fine_tune(
    tmp_path: Path, base: Path, config: dict[str, Any], words: str
) -> None:
    other = make.write_tiny_base(tmp_path / "other", **config)
    said = refused(base, other, AdapterError, words)
    assert str(base) in said
    assert str(other) in said


def test_missing_tensors_are_named(tmp_path: Path, base: Path) -> None:
    from safetensors.torch import save_file

    other = make.copy_model(base, tmp_path / "other", lambda name, weight: weight)
    kept = {n: w for n, w in make.weights(base) if n != "model.layers.1.mlp.up_proj.weight"}
    save_file(kept, other / "model.safetensors")
    refused(
        base,
        other,
        CheckpointError,
        r"1 of the \d+ tensors of the model in config\.json are missing.*layers\.1\.mlp\.up_proj",
    )


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["model.layers.1.mlp.up_proj.weight", "model.norm.weight"])
def test_values_that_are_not_finite_are_named_with_their_place(
    tmp_path: Path, base: Path, name: str, value: float
) -> None:
    place = (5, 7) if "up_proj" in name else (5,)

    def poison(tensor: str, weight: torch.Tensor) -> torch.Tensor:
        if tensor == name:
            weight[place] = value
        return weight

    tuned = make.copy_model(base, tmp_path / "tuned", poison)
    refused(base, tuned, CheckpointError, re.escape(f"{name} in {tuned} holds {value} at {list(place)}"))
    refused(tuned, base, CheckpointError, re.escape(f"{name} in {tuned} holds {value} at {list(place)}"))


def test_places_beyond_the_first_chunk(tmp_path: Path, base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "CHUNK", 100)

    def poison(tensor: str, weight: torch.Tensor) -> torch.Tensor:
        if tensor == "model.layers.0.mlp.gate_proj.weight":
            weight[40, 3] = float("nan")
        return weight

    tuned = make.copy_model(base, tmp_path / "tuned", poison)
    refused(base, tuned, CheckpointError, re.escape("holds nan at [40, 3]"))


def test_the_base_itself_is_no_fine_tune(tmp_path: Path, base: Path) -> None:
    same = make.copy_model(base, tmp_path / "same", lambda name, weight: weight)
    refused(base, same, AdapterError, r"all 20 tensors .* equal .*the base itself")


def test_a_base_that_is_not_the_base(tmp_path: Path, base: Path) -> None:
    """The difference of unrelated weights of one size has sqrt(2) times their norm."""
    other = make.write_tiny_base(tmp_path / "other", 7)
    said = refused(
        base, other, checks.ImplausibleBase, "give the checkpoint that the fine-tune was trained from$"
    )
    distance = float(re.findall(r"differ .* by ([\d.]+) of", said)[0])
    assert distance == pytest.approx(2**0.5, rel=0.05)
    result = compress(Job(base, other, tmp_path / "delta", magnitude(), force=True))
    assert any(
        "check that the fine-tune was trained from this base" in warning for warning in result.warnings
    )


def test_a_refused_registration_names_the_command_that_can_force_it(tmp_path: Path, base: Path) -> None:
    other = make.write_tiny_base(tmp_path / "other", 7)
    request = CompressRequest(base, other, tmp_path / "work", Recipe("magnitude"))
    request.folder.mkdir()
    with pytest.raises(
        AdapterError, match="or run `ostinato compress --force` and register the delta as an adapter"
    ):
        artifact_of(request, lambda share, doing: None)


@pytest.mark.parametrize("size", [8, 32, 96])
def test_groups_that_no_engine_loads_are_refused_before_the_work(tmp_path: Path, size: int) -> None:
    """A GPU loads the codes of 64 columns at once: where a layer has them, a scale serves multiples of 64."""
    wide = make.write_tiny_base(tmp_path / "base", hidden_size=64, intermediate_size=192, head_dim=16)
    tuned = make.write_tuned(wide, tmp_path / "tuned", 1)
    with pytest.raises(
        OptionError, match=r"inputs, (in groups|which is not a multiple) .*each row has one scale"
    ):
        compress(
            Job(wide, tuned, tmp_path / "delta", magnitude(4, size)), lambda share, doing: pytest.fail(doing)
        )
    assert not [*tmp_path.glob("*delta*")]


def test_groups_that_engines_load_are_made_and_read(tmp_path: Path) -> None:
    wide = make.write_tiny_base(tmp_path / "base", hidden_size=64, intermediate_size=192, head_dim=16)
    tuned = make.write_tuned(wide, tmp_path / "tuned", 1)
    folder = compress(Job(wide, tuned, tmp_path / "delta", magnitude(4, 64))).folder
    read_manifest(folder, read_model(wide), VariantLimits(1))
    delta = json.loads((folder / "delta.json").read_text())
    (folder / "delta.json").write_text(json.dumps({**delta, "group_size": 32}))
    with pytest.raises(AdapterError, match=r"in groups of 32, but the group size must be a multiple of 64"):
        read_manifest(folder, read_model(wide), VariantLimits(1))


def test_an_adapter_is_called_by_its_own_folder(tmp_path: Path, base: Path) -> None:
    strong = make.write(base, tmp_path / "lora", RandomLora("l", 4, 1, strength=0.4))
    result = compress(Job(base, strong, tmp_path / "delta", magnitude()))
    (warning,) = (warning for warning in result.warnings if "differ from those of" in warning)
    assert f"linear layers of {strong} differ from those of {base} by" in warning


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_loss_that_is_no_limit_is_refused_before_the_work(tmp_path: Path, value: float) -> None:
    """The folders are not even looked for."""
    options = Options(MethodName.auto)
    places = (tmp_path / "a", tmp_path / "b", tmp_path / "c")
    asked = Request(*places, options, evaluation=tmp_path, max_loss=value)
    with pytest.raises(OptionError, match="expected a finite percentage, got"):
        run(asked)


@pytest.mark.parametrize(("strength", "warned"), [(0.1, False), (0.3, True)])
def test_a_large_distance_is_warned_of(tmp_path: Path, base: Path, strength: float, warned: bool) -> None:
    tuned = make.write_tuned(base, tmp_path / "tuned", 3, strength)
    result = compress(Job(base, tuned, tmp_path / "delta", magnitude()))
    assert any("differ from those of" in warning for warning in result.warnings) == warned


def test_the_distance_is_that_of_the_linear_layers(tmp_path: Path, base: Path) -> None:
    tuned = make.write_tuned(base, tmp_path / "tuned", 3)
    old, new = dict(make.weights(base)), dict(make.weights(tuned))
    linear = [name for name in old if name.endswith("_proj.weight")]
    change = torch.cat([(new[name] - old[name]).flatten() for name in linear]).double().norm()
    whole = torch.cat([old[name].flatten() for name in linear]).double().norm()
    found = checks.scan(Checkpoint(base), Checkpoint(tuned), "cpu", lambda share, what: None)
    assert found.distance == pytest.approx(float(change / whole), rel=1e-6)
    assert (found.tensors, found.differing) == (len(old), len(old))


LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
LINEAR = {"rope_type": "linear", "factor": 2.0}
OLD_LLAMA3 = {"rope_theta": 500000.0, "rope_scaling": {**LLAMA3, "rope_type": "llama3"}}
NEW_LLAMA3 = {"rope_parameters": {**LLAMA3, "rope_type": "llama3", "rope_theta": 500000.0}}
LONGER = {"rope_parameters": {**NEW_LLAMA3["rope_parameters"], "factor": 32.0}}


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        (
            {"rope_theta": 10000.0},
            {"rope_theta": 500000.0},
            ["rope_theta 500000.0, but the base has 10000.0"],
        ),
        ({}, {"rope_theta": 500000.0}, ["rope_theta 500000.0, but the base has 10000.0"]),
        ({}, {"rope_scaling": LINEAR}, [f"rope_scaling {LINEAR}, but the base has None"]),
        ({"rope_scaling": LINEAR}, {"rope_scaling": None}, [f"rope_scaling None, but the base has {LINEAR}"]),
        (NEW_LLAMA3, LONGER, ["'factor': 32.0", "'factor': 8.0"]),
        ({}, {"partial_rotary_factor": 0.5}, ["rope_scaling {'partial_rotary_factor': 0.5}"]),
        ({"rms_norm_eps": 1e-5}, {"rms_norm_eps": 1e-6}, ["rms_norm_eps 1e-06, but the base has 1e-05"]),
        ({"sliding_window": None}, {"sliding_window": 512}, ["sliding_window 512, but the base has None"]),
        ({"sliding_window": 512}, {"sliding_window": None}, ["sliding_window None, but the base has 512"]),
        ({"query_pre_attn_scalar": 8}, {"query_pre_attn_scalar": 4}, ["query_pre_attn_scalar 4"]),
    ],
)
def test_settings_that_engines_take_from_the_base(
    tmp_path: Path, before: dict[str, Any], after: dict[str, Any], words: list[str]
) -> None:
    (warning,) = warned(tmp_path, before, after)
    assert all(word in warning for word in words), warning


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"rope_theta": 10000.0}, {"rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"}}),
        ({}, {"rope_theta": 10000.0, "rope_scaling": None}),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, {"rope_parameters": LINEAR}),
        (OLD_LLAMA3, NEW_LLAMA3),
        ({"use_sliding_window": False, "sliding_window": 512}, {"sliding_window": None}),
    ],
)
def test_equal_settings_in_another_form_are_accepted(
    tmp_path: Path, before: dict[str, Any], after: dict[str, Any]
) -> None:
    assert warned(tmp_path, before, after) == []


@pytest.mark.parametrize("old", [OLD_LLAMA3, {"rope_scaling": {"type": "linear", "factor": 2.0}}, {}])
def test_settings_as_transformers_saves_them_again(tmp_path: Path, old: dict[str, Any]) -> None:
    """Additions of the training library to a fine-tune's folder are no difference."""
    from transformers import AutoConfig

    base = make.write_tiny_base(tmp_path / "base", **old)
    tuned = make.copy_model(base, tmp_path / "tuned", lambda name, weight: weight)
    AutoConfig.from_pretrained(base).save_pretrained(tuned)
    assert checks.check_alike(Checkpoint(base), Checkpoint(tuned)) == []


def test_a_gemma3_as_transformers_saves_it_again(tmp_path: Path) -> None:
    """Its published configs have one rope_theta for each kind of layer, and a pattern of windows."""
    from transformers import AutoConfig

    base = write_gemma3(tmp_path / "base")
    config = json.loads((base / "config.json").read_text())
    newer = ("rope_parameters", "layer_types", "_sliding_window_pattern")
    old = {key: value for key, value in config.items() if key not in newer}
    ropes = {
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
        "rope_scaling": {"rope_type": "linear", "factor": 8},
    }
    (base / "config.json").write_text(json.dumps({**old, **ropes, "sliding_window_pattern": 2}))
    tuned = make.copy_model(base, tmp_path / "tuned", lambda name, weight: weight)
    AutoConfig.from_pretrained(base).save_pretrained(tuned)
    assert checks.check_alike(Checkpoint(base), Checkpoint(tuned)) == []
    again = json.loads((tuned / "config.json").read_text())
    again["rope_parameters"]["sliding_attention"]["rope_theta"] = 2e4
    (tuned / "config.json").write_text(json.dumps(again))
    (warning,) = checks.check_alike(Checkpoint(base), Checkpoint(tuned))
    assert "20000.0" in warning


OLD = {
    "gpt_neox": {"rotary_emb_base": 20000, "rotary_pct": 0.5},
    "phi": {"rope_theta": 20000.0, "partial_rotary_factor": 0.4},
    "gemma3_text": {
        "rope_theta": 1e6,
        "rope_local_base_freq": 10000.0,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    },
    "mixtral": {},
    "qwen2": {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}},
}


@pytest.mark.parametrize(("family", "old"), list(OLD.items()))
def test_rope_of_older_configs_is_what_transformers_reads(family: str, old: dict[str, Any]) -> None:
    from transformers import AutoConfig

    read = AutoConfig.for_model(family, **old).to_dict()
    assert rope_of({"model_type": family, **old}) == rope_of({"rope_parameters": read["rope_parameters"]})


def warned(tmp_path: Path, before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    base = make.write_tiny_base(tmp_path / "base", **before)
    tuned = make.write_tiny_base(tmp_path / "tuned", **after)
    return checks.check_alike(Checkpoint(base), Checkpoint(tuned))
