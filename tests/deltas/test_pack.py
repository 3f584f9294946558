"""Compressing a fine-tune: what is written is read back, fits its base only, and is there whole or not."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import random_variants as make
import torch
from checkpoints import verify_values
from random_adapters import RandomLora
from random_variants import RandomDelta

from profiler.checkpoint import read_model
from profiler.errors import AdapterError, CheckpointError
from profiler.variants.reading import read_manifest
from profiler.variants.types import LoraManifest, SparseManifest, SvdManifest, VariantKind, VariantLimits
from profiler.variants.verifying import verify
from profiler.weight_files import locate
from workers.deltas import sparse
from workers.deltas.merged import delta
from workers.deltas.pack import Encoded, Method, pack, sparse_method, sparse_parts, svd_method
from workers.deltas.tensors import read_tensor

LIMITS = VariantLimits(16)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make.write_tiny_base(tmp_path_factory.mktemp("models") / "base")


@pytest.fixture(scope="module")
def tuned(base: Path) -> Path:
    return make.write_tuned(base, base.parent / "tuned", 1)


def errors_of(base: Path, tuned: Path, folder: Path) -> list[float]:
    """|stored - true| / |true| of every module's delta."""
    manifest = read_manifest(folder, read_model(base), LIMITS)
    assert isinstance(manifest, SparseManifest | SvdManifest)
    places, found = (locate(base), locate(tuned)), []
    for name, module in manifest.modules.items():
        old, new = (
            read_tensor(at, p[f"{name}.weight"]).double() for at, p in zip((base, tuned), places, strict=True)
        )
        stored = delta(module, (old.shape[0], old.shape[1]), lambda ref: read_tensor(folder, ref))
        found.append(float((stored - (new - old)).norm() / (new - old).norm()))
    return found


@pytest.mark.parametrize(
    ("method", "worst"),
    [
        (sparse_method(4), 0.5),
        (sparse_method(2, 8), 0.7),
        (svd_method(1.0), 0.2),
        (svd_method(), 0.9),
    ],
)
def test_each_method_comes_near(
    tmp_path: Path, base: Path, tuned: Path, method: Method, worst: float
) -> None:
    told: list[float] = []
    spec = pack(base, tuned, tmp_path / "delta", method, lambda share, what: told.append(share))
    assert spec.kind == method.kind
    assert spec.target_modules == tuple(read_model(base).linear_shapes)
    assert (spec.replaces_embedding, spec.replaces_head) == (True, False)
    assert told == sorted(told)
    assert told[-1] == 1.0
    assert max(errors_of(base, tuned, tmp_path / "delta")) < worst
    verify(tmp_path / "delta")
    verify_values(read_manifest(tmp_path / "delta", read_model(base), LIMITS))


def test_one_file_per_layer_and_one_for_the_rest(tmp_path: Path, base: Path, tuned: Path) -> None:
    pack(base, tuned, tmp_path / "delta", sparse_method())
    names = {path.name for path in (tmp_path / "delta").iterdir()}
    assert names == {"delta.json", "layer-00000.safetensors", "layer-00001.safetensors", "full.safetensors"}
    manifest = read_manifest(tmp_path / "delta", read_model(base), LIMITS)
    assert manifest.full["model.layers.1.input_layernorm.weight"].file == "layer-00001.safetensors"
    assert {ref.file for name, ref in manifest.full.items() if ".layers." not in name} == {"full.safetensors"}


def test_only_what_differs_is_stored(tmp_path: Path, base: Path) -> None:
    def change(name: str, weight: torch.Tensor) -> torch.Tensor:
        return weight + (0.1 if name == "model.layers.1.mlp.up_proj.weight" else 0.0)

    tuned = make.copy_model(base, tmp_path / "tuned", change)
    spec = pack(base, tuned, tmp_path / "delta", sparse_method())
    assert (spec.target_modules, spec.full_bytes) == (("up_proj",), 0)
    assert {path.name for path in (tmp_path / "delta").iterdir()} == {"delta.json", "layer-00001.safetensors"}


def test_biases_are_stored_in_full(tmp_path: Path) -> None:
    base = make.write_tiny_base(tmp_path / "base", **make.QWEN2)
    spec = pack(base, make.write_tuned(base, tmp_path / "tuned", 1), tmp_path / "delta", sparse_method())
    manifest = read_manifest(tmp_path / "delta", read_model(base), LIMITS)
    assert "model.layers.0.self_attn.k_proj.bias" in manifest.full
    assert spec.full_bytes == sum(ref.size_bytes for ref in manifest.full.values())


@pytest.mark.parametrize(
    ("base_tied", "tuned_tied", "head"), [(True, True, False), (True, False, True), (False, True, True)]
)
def test_a_head_of_its_own(tmp_path: Path, base_tied: bool, tuned_tied: bool, head: bool) -> None:
    base = make.write_tiny_base(tmp_path / "base", tie_word_embeddings=base_tied)
    tuned = make.write_tiny_base(tmp_path / "tuned", 1, tie_word_embeddings=tuned_tied)
    spec = pack(base, tuned, tmp_path / "delta", sparse_method())
    assert (spec.replaces_embedding, spec.replaces_head) == (True, head)


def test_the_step_can_be_replaced(tmp_path: Path, base: Path, tuned: Path) -> None:
    """As a calibrated compressor will: here one that keeps columns 0 and 3 of every four."""

    def step(name: str, old: torch.Tensor, new: torch.Tensor) -> Encoded:
        positions = torch.tensor([0, 3], dtype=torch.uint8).repeat(old.shape[0], old.shape[1] // 4)
        kept = (new - old)[:, torch.arange(old.shape[1]) % 4 % 3 == 0]
        scales = sparse.scales_of(kept, 4, None)
        return sparse_parts(sparse.pack(sparse.codes_of(kept, scales, 4), positions, scales, 4))

    method = Method(VariantKind.SPARSE_DELTA, "every third", {"bits": 4, "group_size": None}, step)
    pack(base, tuned, tmp_path / "delta", method)
    assert json.loads((tmp_path / "delta" / "delta.json").read_text())["method"] == "every third"
    assert max(errors_of(base, tuned, tmp_path / "delta")) < 0.9


def test_another_shape_is_no_fine_tune(tmp_path: Path, base: Path) -> None:
    other = make.write_tiny_base(tmp_path / "other", vocab_size=72)
    with pytest.raises(AdapterError, match="embedding"):
        pack(base, other, tmp_path / "delta", sparse_method())
    assert list(tmp_path.glob("*delta*")) == []


def test_what_cannot_be_coded_is_named_and_nothing_is_left(tmp_path: Path, base: Path) -> None:
    def poison(name: str, weight: torch.Tensor) -> torch.Tensor:
        return weight / 0.0 if name.endswith("layers.1.mlp.up_proj.weight") else weight

    tuned = make.copy_model(base, tmp_path / "tuned", poison)
    for method in (sparse_method(), svd_method()):
        with pytest.raises(AdapterError, match=r"layers\.1\.mlp\.up_proj.*finite"):
            pack(base, tuned, tmp_path / "delta", method)
    narrow = make.write_tiny_base(tmp_path / "narrow", intermediate_size=36)
    with pytest.raises(AdapterError, match=r"down_proj.*multiple of 8"):
        pack(narrow, make.write_tuned(narrow, tmp_path / "t2", 1), tmp_path / "delta", sparse_method())
    assert list(tmp_path.glob("*delta*")) == []


def test_a_folder_that_exists_stays(tmp_path: Path, base: Path, tuned: Path) -> None:
    (tmp_path / "delta").mkdir()
    with pytest.raises(CheckpointError, match="exists"):
        pack(base, tuned, tmp_path / "delta", sparse_method())
    assert list((tmp_path / "delta").iterdir()) == []


def test_a_delta_fits_its_base_only(tmp_path: Path, base: Path) -> None:
    folder = make.write(base, tmp_path / "delta", RandomDelta("d", 1))
    sibling = make.write_tuned(base, tmp_path / "sibling", 9, full=False)
    with pytest.raises(AdapterError, match="made from the base"):
        read_manifest(folder, read_model(sibling), LIMITS)
    sharded = make.write_tiny_base(tmp_path / "sharded", shards=3)
    assert read_manifest(folder, read_model(sharded), LIMITS).spec.kind is VariantKind.SPARSE_DELTA


def test_damage_is_found_when_bytes_are_read(tmp_path: Path, base: Path) -> None:
    folder = make.write(base, tmp_path / "delta", RandomDelta("d", 1))
    manifest = read_manifest(folder, read_model(base), LIMITS)
    path = folder / "layer-00001.safetensors"
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)
    with pytest.raises(CheckpointError, match=r"layer-00001.*corrupt"):
        verify(folder)
    with pytest.raises(CheckpointError, match=r"layer-00001.*corrupt"):
        verify_values(manifest)


def test_values_that_are_not_finite_are_refused(tmp_path: Path, base: Path) -> None:
    folder = make.write(base, tmp_path / "lora", RandomLora("l", 4, 1))
    manifest = read_manifest(folder, read_model(base), LIMITS)
    verify_values(manifest)
    assert isinstance(manifest, LoraManifest)
    ref = next(iter(manifest.modules.values())).a
    with (folder / ref.file).open("r+b") as file:
        file.seek(ref.offset)
        file.write(np.float32("nan").tobytes())
    with pytest.raises(CheckpointError, match=r"lora_A.*not finite"):
        verify_values(manifest)
