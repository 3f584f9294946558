"""Variants that are made up to measure with: read like any other, as large as arithmetic says."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from profiler.measurements import SyntheticVariant
from profiler.profiling_plan import Reach, profiling_plan
from profiler.types import ModelSpec
from profiler.variants.reading import read_variant
from profiler.variants.synthetic import synthetic_spec
from profiler.variants.types import VariantKind, VariantLimits
from testkit import random_variants
from workers.deltas import sparse
from workers.measuring import synthetic_variants

WIDE = {**random_variants.TINY, "hidden_size": 64, "head_dim": 16, "intermediate_size": 96}
MADE = (
    SyntheticVariant("lora", rank=4),
    SyntheticVariant("sparse_delta", bits=4),
    SyntheticVariant("sparse_delta", bits=2),
    SyntheticVariant("boft", factors=1, block_size=8),
    SyntheticVariant("boft", factors=2, block_size=16),
)


@pytest.fixture
def base(tmp_path: Path) -> ModelSpec:
    (tmp_path / "config.json").write_text(json.dumps(WIDE))
    (tmp_path / "tokenizer.json").write_text("{}")
    return synthetic_variants.write_weightless(tmp_path, "float32")


@pytest.mark.parametrize("made", MADE, ids=str)
def test_synthetic_variants_have_the_computed_bytes(
    base: ModelSpec, tmp_path: Path, made: SyntheticVariant
) -> None:
    folder = synthetic_variants.write(made, base, 2, tmp_path / "made")
    read = read_variant(folder, base, VariantLimits(8))
    expected = synthetic_spec(base, made)
    assert (read.kind, read.modules, read.bits) == (expected.kind, expected.modules, expected.bits)
    assert read.weight_bytes == expected.weight_bytes


def test_only_the_first_layers_are_written(base: ModelSpec, tmp_path: Path) -> None:
    made = SyntheticVariant("lora", rank=2)
    one = read_variant(synthetic_variants.write(made, base, 1, tmp_path / "one"), base, VariantLimits(8))
    assert 2 * one.weight_bytes == synthetic_spec(base, made).weight_bytes


def test_seeds_make_them_differ(base: ModelSpec, tmp_path: Path) -> None:
    files = [
        synthetic_variants.write(SyntheticVariant("lora", rank=2, seed=seed), base, 1, tmp_path / str(number))
        / "adapter_model.safetensors"
        for number, seed in enumerate((1, 1, 2))
    ]
    first, same, other = (file.read_bytes() for file in files)
    assert first == same != other


def test_low_rank_deltas_are_not_made(base: ModelSpec, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="LoRA represents low-rank deltas"):
        synthetic_spec(base, SyntheticVariant("svd_delta"))
    with pytest.raises(ValueError, match="LoRA represents low-rank deltas"):
        synthetic_variants.write(SyntheticVariant("svd_delta"), base, 1, tmp_path / "made")


def test_only_what_the_widths_allow_is_measured(base: ModelSpec) -> None:
    reach = Reach(True, 1, 1 << 40, 64, 16, 2048, max_lora_rank=4)
    kinds = {one.kind for run in profiling_plan(base, reach) for one in run.variants}
    assert kinds == {"lora", "sparse_delta", "boft"}
    odd = {name: (out + 4, into + 4) for name, (out, into) in base.linear_shapes.items()}
    (run,) = profiling_plan(replace(base, linear_shapes=odd), reach)
    assert {one.kind for one in run.variants} == {VariantKind.LORA}
    assert max(one.rank for one in run.variants) == 4
    (run,) = profiling_plan(replace(base, linear_shapes={}, linears={}), reach)
    assert not run.variants


def test_a_sparse_delta_has_as_many_bytes_as_its_code(base: ModelSpec, tmp_path: Path) -> None:
    """Independent of files: the coder's own tensors."""
    import torch

    code = sparse.encode(torch.randn(64, 64), 4)
    held = sum(tensor.nbytes for tensor in (code.values, code.indices, code.scales))
    assert synthetic_spec(base, SyntheticVariant("sparse_delta", bits=4)).modules["q_proj"].size_bytes == held
