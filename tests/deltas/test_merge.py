"""Merging: the checkpoint that comes out computes what the base and the variant do together."""

from __future__ import annotations

import importlib.util
import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

from profiler.checkpoint import read_model
from profiler.errors import AdapterError, CheckpointError
from profiler.variants.reading import read_manifest
from profiler.variants.types import VariantLimits
from profiler.weight_files import locate
from testkit import random_adapters
from testkit import random_variants as make
from testkit.random_adapters import ATTENTION, MLP, RandomLora
from testkit.random_variants import EVERY_KIND, RandomBoft, RandomDelta, RandomVariant
from workers.compression.job import Job, compress
from workers.compression.methods.magnitude import magnitude
from workers.deltas.merge import merge
from workers.deltas.tensors import read_tensor

needs_peft = pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="PEFT is not installed")


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return {name: read_tensor(folder, ref) for name, ref in locate(folder).items()}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make.write_tiny_base(tmp_path_factory.mktemp("models") / "base")


@pytest.mark.parametrize("variant", EVERY_KIND, ids=lambda variant: variant.name)
@pytest.mark.parametrize("shards", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_every_kind_gives_a_checkpoint_near_its_base(
    tmp_path: Path, variant: RandomVariant, shards: int
) -> None:
    base = make.write_tiny_base(tmp_path / "base", shards=shards, torch_dtype="bfloat16")
    folder, out = make.write(base, tmp_path / "variant", variant), tmp_path / "merged"
    told: list[float] = []
    merge(base, folder, out, lambda share, what: told.append(share))
    assert told == sorted(told)
    assert read_model(out).weight_bytes == read_model(base).weight_bytes
    assert {path.name for path in out.iterdir()} == {path.name for path in base.iterdir()}
    old, new = weights(base), weights(out)
    assert old.keys() == new.keys()
    for name, weight in old.items():
        assert new[name].dtype == weight.dtype
        change = (new[name].double() - weight.double()).norm() / weight.double().norm()
        changed = name.split(".")[-2] in getattr(variant, "modules", ATTENTION + MLP)
        changed = changed or (isinstance(variant, RandomDelta) and variant.full)
        assert 0.01 < change < 0.5 if changed else change == 0, name


@pytest.mark.parametrize("lora", [RandomLora("a", 8, 1), RandomLora("b", 3, 2, rank_stabilised=True)])
def test_a_merged_lora_equals_the_product_by_hand(tmp_path: Path, base: Path, lora: RandomLora) -> None:
    folder = make.write(base, tmp_path / "lora", lora)
    merge(base, folder, tmp_path / "merged")
    new, pairs = weights(tmp_path / "merged"), dict(make.weights_in(folder / "adapter_model.safetensors"))
    scale = lora.alpha / (lora.rank**0.5 if lora.rank_stabilised else lora.rank)
    for name, weight in weights(base).items():
        at = f"base_model.model.{name.removesuffix('.weight')}"
        if f"{at}.lora_A.weight" in pairs:
            product = pairs[f"{at}.lora_B.weight"].double() @ pairs[f"{at}.lora_A.weight"].double()
            assert torch.allclose(new[name].double(), weight.double() + scale * product, atol=1e-6)


def test_full_tensors_are_those_of_the_fine_tune(tmp_path: Path) -> None:
    base = make.write_tiny_base(tmp_path / "base", **make.QWEN2)
    delta = RandomDelta("d", 3)
    tuned = make.write_tuned(base, tmp_path / "tuned", delta.seed, delta.strength)
    merge(base, make.write(base, tmp_path / "delta", delta), tmp_path / "merged")
    new, expected = weights(tmp_path / "merged"), weights(tuned)
    table = "model.embed_tokens.weight"
    for name in expected.keys() - {table}:
        if not name.endswith("_proj.weight"):
            assert torch.equal(new[name], expected[name]), name
    assert_within_a_step(new[table], expected[table], weights(base)[table])


def assert_within_a_step(found: torch.Tensor, tuned: torch.Tensor, base: torch.Tensor) -> None:
    """Half of one in 127 to a row's largest change."""
    step = (tuned.double() - base.double()).abs().amax(dim=1, keepdim=True) / 127
    assert ((found.double() - tuned.double()).abs() <= step * 0.501).all()
    assert not torch.equal(found, tuned)


@pytest.mark.parametrize("tied", [True, False])
def test_tables_that_change_much_are_stored_whole(tmp_path: Path, tied: bool) -> None:
    """Eight bits of such a change would say less than a bfloat16 of the weight."""
    base = make.write_tiny_base(tmp_path / "base", tie_word_embeddings=tied)
    for much, whole in ((0.05, False), (1.0, True)):
        delta = RandomDelta("d", 3, tables=much)
        tuned = make.write_tuned(base, tmp_path / f"tuned-{much}", 3, tables=much)
        folder = make.write(base, tmp_path / f"delta-{much}", delta)
        manifest = read_manifest(folder, read_model(base), VariantLimits(0))
        tables = {"model.embed_tokens.weight"} | (set() if tied else {"lm_head.weight"})
        assert manifest.differences.keys() == (set() if whole else tables)
        assert tables & manifest.full.keys() == (tables if whole else set())
        assert json.loads((folder / "delta.json").read_text())["version"] == (1 if whole else 3)
        merge(base, folder, tmp_path / f"merged-{much}")
        new, expected, old = (weights(f) for f in (tmp_path / f"merged-{much}", tuned, base))
        for name in tables:
            if whole:
                assert torch.equal(new[name], expected[name])
            else:
                assert_within_a_step(new[name], expected[name], old[name])


def test_a_head_of_its_own_unties_the_config(tmp_path: Path, base: Path) -> None:
    tuned = make.write_tiny_base(tmp_path / "tuned", 1, tie_word_embeddings=False)
    for shards in (1, 3):
        start = make.write_tiny_base(tmp_path / f"base{shards}", shards=shards)
        compress(Job(start, tuned, tmp_path / f"delta{shards}", magnitude(), force=True))
        merge(start, tmp_path / f"delta{shards}", tmp_path / f"merged{shards}")
        out = tmp_path / f"merged{shards}"
        assert json.loads((out / "config.json").read_text())["tie_word_embeddings"] is False
        assert not read_model(out).tied
        assert torch.equal(weights(out)["lm_head.weight"], weights(tuned)["lm_head.weight"])
        assert torch.equal(
            weights(out)["model.embed_tokens.weight"], weights(tuned)["model.embed_tokens.weight"]
        )


def test_nothing_is_left_of_a_merge_that_fails(tmp_path: Path, base: Path) -> None:
    folder = make.write(base, tmp_path / "delta", RandomDelta("d", 1))
    path = folder / "layer-00001.safetensors"
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)
    with pytest.raises(CheckpointError, match="corrupt"):
        merge(base, folder, tmp_path / "merged")
    other = make.write_tiny_base(tmp_path / "other", 5)
    with pytest.raises(AdapterError, match="base"):
        merge(other, folder, tmp_path / "merged")
    assert list(tmp_path.glob("*merged*")) == []


# --- against PEFT -----------------------------------------------------------------------------------------


def peft_merged(base: Path, adapter: Path) -> dict[str, torch.Tensor]:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    merged = PeftModel.from_pretrained(model, str(adapter)).merge_and_unload()
    return dict(merged.state_dict())


@needs_peft
@pytest.mark.parametrize(
    "variant",
    [
        RandomLora("a", 8, 1),
        RandomLora("b", 3, 2, rank_stabilised=True),
        RandomBoft("c", 3, 1, 16),
        RandomBoft("d", 4, 1, 4, ("q_proj", "down_proj")),
    ],
    ids=lambda variant: variant.name,
)
def test_the_merge_equals_peft_s(tmp_path: Path, base: Path, variant: RandomVariant) -> None:
    folder = make.write(base, tmp_path / "adapter", variant)
    merge(base, folder, tmp_path / "merged")
    expected = peft_merged(base, folder)
    for name, weight in weights(tmp_path / "merged").items():
        assert torch.allclose(weight, expected[name], atol=2e-6), name


@needs_peft
@pytest.mark.parametrize("bias", ["none", "boft_only", "all"])
def test_a_boft_adapter_with_biases_is_read_as_peft_saves_it(tmp_path: Path, bias: str) -> None:
    """PEFT without its CUDA extension trains m=1 and still writes m=2 into the config."""
    from peft import BOFTConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    base = make.write_tiny_base(tmp_path / "base", **make.QWEN2)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    config = BOFTConfig(
        boft_block_size=8, boft_n_butterfly_factor=2, target_modules=["q_proj", "up_proj"], bias=bias
    )
    peft: Any = get_peft_model(model, config)
    with torch.no_grad():
        for name, parameter in peft.named_parameters():
            if "boft_" in name or (parameter.requires_grad and name.endswith("bias")):
                parameter.add_(0.1 * torch.randn(parameter.shape))
    peft.save_pretrained(tmp_path / "adapter")
    merge(base, tmp_path / "adapter", tmp_path / "merged")
    expected = dict(peft.merge_and_unload().state_dict())
    for name, weight in weights(tmp_path / "merged").items():
        assert torch.allclose(weight, expected[name], atol=2e-6), name


@pytest.mark.slow
@pytest.mark.parametrize("variant", [RandomBoft("b", 1, 2, 8), RandomLora("l", 8, 1)], ids=lambda v: v.name)
def test_transformers_serves_what_was_merged(base: Path, variant: RandomVariant) -> None:
    """Loaded by transformers, the merged checkpoint computes what the layers' formulas say."""
    with tempfile.TemporaryDirectory() as name:
        folder = make.write(base, Path(name) / "variant", variant)
        merge(base, folder, Path(name) / "merged")
        model = random_adapters.merged_model(Path(name) / "merged", None)
        logits = random_adapters.log_probabilities(model, [1, 2, 3], [4, 5])
        plain = random_adapters.log_probabilities(random_adapters.merged_model(base, None), [1, 2, 3], [4, 5])
    assert bool(logits.isfinite().all())
    assert float((logits - plain).abs().max()) > 1e-3
