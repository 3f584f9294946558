"""Compressing a fine-tune: what is written is read back, fits its base only, and is there whole or not."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from profiler.checkpoint import read_model
from profiler.errors import AdapterError, CheckpointError
from profiler.variants.reading import read_manifest
from profiler.variants.types import LoraManifest, SparseManifest, SvdManifest, VariantKind, VariantLimits
from profiler.variants.verifying import verify
from profiler.weight_files import locate
from testkit import random_variants as make
from testkit.checkpoints import verify_values
from testkit.random_adapters import RandomLora
from testkit.random_variants import RandomDelta, rounded_svd
from workers.compression.job import Job, compress
from workers.compression.methods.magnitude import magnitude
from workers.compression.types import Compressed, Encoded, Method, Problem
from workers.deltas import sparse
from workers.deltas.merge import merge
from workers.deltas.merged import delta
from workers.deltas.parts import sparse_parts
from workers.deltas.tensors import read_tensor

LIMITS = VariantLimits(16)
WHOLE = Method(
    "half precision", None, False, lambda p: Compressed(p.tuned.half().float(), 2 * p.tuned.numel(), None)
)


def errors_of(base: Path, tuned: Path, folder: Path) -> dict[str, float]:
    """|stored - true| / |true| of every module's delta."""
    manifest = read_manifest(folder, read_model(base), LIMITS)
    assert isinstance(manifest, SparseManifest | SvdManifest)
    places, found = (locate(base), locate(tuned)), {}
    for name, module in manifest.modules.items():
        old, new = (
            read_tensor(at, p[f"{name}.weight"]).double() for at, p in zip((base, tuned), places, strict=True)
        )
        stored = delta(module, (old.shape[0], old.shape[1]), lambda ref: read_tensor(folder, ref))
        found[name] = float((stored - (new - old)).norm() / (new - old).norm())
    return found


@pytest.mark.parametrize(
    ("method", "worst"),
    [(magnitude(4), 0.5), (magnitude(2, 8), 0.7), (rounded_svd(1.0), 0.2), (rounded_svd(), 0.9)],
)
def test_each_method_comes_near(
    tmp_path: Path, base: Path, tuned: Path, method: Method, worst: float
) -> None:
    told: list[float] = []
    job = Job(base, tuned, tmp_path / "delta", method)
    spec = compress(job, lambda share, what: told.append(share)).spec
    assert spec is not None
    assert spec.kind == method.kind
    assert spec.target_modules == tuple(read_model(base).linear_shapes)
    assert (spec.replaces_embedding, spec.replaces_head) == (True, False)
    assert told == sorted(told)
    assert told[-1] == 1.0
    assert max(errors_of(base, tuned, tmp_path / "delta").values()) < worst
    verify(tmp_path / "delta")
    verify_values(read_manifest(tmp_path / "delta", read_model(base), LIMITS))
    assert [path.name for path in tmp_path.iterdir()] == ["delta"]


def test_one_file_per_layer_and_one_for_the_rest(tmp_path: Path, base: Path, tuned: Path) -> None:
    compress(Job(base, tuned, tmp_path / "delta", magnitude()))
    names = {path.name for path in (tmp_path / "delta").iterdir()}
    assert names == {"delta.json", "layer-00000.safetensors", "layer-00001.safetensors", "full.safetensors"}
    manifest = read_manifest(tmp_path / "delta", read_model(base), LIMITS)
    assert manifest.full["model.layers.1.input_layernorm.weight"].file == "layer-00001.safetensors"
    assert {ref.file for name, ref in manifest.full.items() if ".layers." not in name} == {"full.safetensors"}


def test_only_what_differs_is_stored(tmp_path: Path, base: Path) -> None:
    def change(name: str, weight: torch.Tensor) -> torch.Tensor:
        return weight + (0.1 if name == "model.layers.1.mlp.up_proj.weight" else 0.0)

    tuned = make.copy_model(base, tmp_path / "tuned", change)
    spec = compress(Job(base, tuned, tmp_path / "delta", magnitude())).spec
    assert spec is not None
    assert (spec.target_modules, spec.full_bytes) == (("up_proj",), 0)
    assert {path.name for path in (tmp_path / "delta").iterdir()} == {"delta.json", "layer-00001.safetensors"}


def test_biases_are_stored_in_full(tmp_path: Path) -> None:
    base = make.write_tiny_base(tmp_path / "base", **make.QWEN2)
    tuned = make.write_tuned(base, tmp_path / "tuned", 1)
    spec = compress(Job(base, tuned, tmp_path / "delta", magnitude())).spec
    manifest = read_manifest(tmp_path / "delta", read_model(base), LIMITS)
    assert "model.layers.0.self_attn.k_proj.bias" in manifest.full
    assert spec is not None
    changed = (ref for d in manifest.differences.values() for ref in (d.codes, d.scales))
    assert spec.full_bytes == sum(ref.size_bytes for ref in (*manifest.full.values(), *changed))


@pytest.mark.parametrize(
    ("base_tied", "tuned_tied", "head"), [(True, True, False), (True, False, True), (False, True, True)]
)
def test_a_head_of_its_own(tmp_path: Path, base_tied: bool, tuned_tied: bool, head: bool) -> None:
    base = make.write_tiny_base(tmp_path / "base", tie_word_embeddings=base_tied)
    tuned = make.write_tiny_base(tmp_path / "tuned", 1, tie_word_embeddings=tuned_tied)
    spec = compress(Job(base, tuned, tmp_path / "delta", magnitude(), force=True)).spec
    assert spec is not None
    assert (spec.replaces_embedding, spec.replaces_head) == (True, head)


def test_any_step_is_a_method(tmp_path: Path, base: Path, tuned: Path) -> None:
    """Here one that keeps columns 0 and 3 of every four."""

    def step(problem: Problem) -> Compressed:
        out, into = problem.delta.shape
        positions = torch.tensor([0, 3], dtype=torch.uint8).repeat(out, into // 4)
        kept = problem.delta[:, torch.arange(into) % 4 % 3 == 0]
        scales = sparse.scales_of(kept, 4, None)
        code = sparse.pack(sparse.codes_of(kept, scales, 4), positions, scales, 4)
        encoded = Encoded(*sparse_parts(code))
        return Compressed(problem.base + sparse.decode(code), encoded.size_bytes, encoded)

    facts = {"bits": 4, "group_size": None}
    method = Method("every third", VariantKind.SPARSE_DELTA, False, step, facts)
    compress(Job(base, tuned, tmp_path / "delta", method))
    assert json.loads((tmp_path / "delta" / "delta.json").read_text())["method"] == "every third"
    assert max(errors_of(base, tuned, tmp_path / "delta").values()) < 0.9


def test_the_result_has_its_cost(tmp_path: Path, base: Path, tuned: Path) -> None:
    result = compress(Job(base, tuned, tmp_path / "delta", magnitude()))
    stored = [t for path in (tmp_path / "delta").glob("*.safetensors") for t in load_file(path).values()]
    assert result.size_bytes == sum(t.numel() * t.element_size() for t in stored)
    assert result.spec is not None
    assert result.size_bytes == result.spec.weight_bytes
    whole = {name: weight.numel() for name, weight in make.weights(tuned)}
    table = whole["model.embed_tokens.weight"]
    stored_table = table + 4 * 64  # 8 bits each, and a scale for each of 64 rows
    assert result.ratio == 2 * sum(whole.values()) / result.size_bytes
    without = 2 * (sum(whole.values()) - table) / (result.size_bytes - stored_table)
    assert result.ratio_without_tables == pytest.approx(without)
    errors = errors_of(base, tuned, tmp_path / "delta")
    for kind, mean in result.layer_errors.items():
        squares = [error**2 for name, error in errors.items() if name.endswith(f".{kind}")]
        assert len(squares) == 2
        assert mean == pytest.approx(sum(squares) / 2, rel=1e-4)
    assert result.warnings == ()


def test_a_method_without_a_variant_leaves_a_checkpoint(tmp_path: Path, base: Path, tuned: Path) -> None:
    result = compress(Job(base, tuned, tmp_path / "whole", WHOLE))
    assert result.spec is None
    assert not read_model(tmp_path / "whole").tied ^ read_model(tuned).tied
    new, expected = dict(make.weights(tmp_path / "whole")), dict(make.weights(tuned))
    assert new.keys() == expected.keys()
    for name, weight in expected.items():
        assert torch.equal(new[name], weight.half().float() if name.endswith("_proj.weight") else weight)
    assert (tmp_path / "whole" / "tokenizer.json").read_bytes() == (tuned / "tokenizer.json").read_bytes()


def test_a_delta_can_be_written_as_a_checkpoint(tmp_path: Path, base: Path, tuned: Path) -> None:
    """The same weights as merging the delta gives, but for an embedding that it has as a difference."""
    compress(Job(base, tuned, tmp_path / "plain", magnitude(), plain=True))
    compress(Job(base, tuned, tmp_path / "delta", magnitude()))
    merge(base, tmp_path / "delta", tmp_path / "merged")
    plain, merged = dict(make.weights(tmp_path / "plain")), dict(make.weights(tmp_path / "merged"))
    assert plain.keys() == merged.keys()
    for name, weight in plain.items():
        step = 0.0
        if name == "model.embed_tokens.weight":
            step = float((weight - dict(make.weights(base))[name]).abs().max()) / 127 / 2
        assert torch.allclose(weight, merged[name], atol=1e-6 + step), name


def test_a_grown_vocabulary_keeps_its_rows(tmp_path: Path, base: Path) -> None:
    """Engines get the base's rows; the other rows are in a file of their own."""
    grown = make.write_tiny_base(tmp_path / "grown", 1, vocab_size=72)
    result = compress(Job(base, grown, tmp_path / "delta", magnitude(), force=True))
    assert result.spec is not None
    assert "grew from 64 to 72" in " ".join(result.warnings)
    table = dict(make.weights(grown))["model.embed_tokens.weight"]
    full = load_file(tmp_path / "delta" / "full.safetensors")
    added = load_file(tmp_path / "delta" / "added-rows.safetensors")
    assert torch.equal(full["model.embed_tokens.weight"], table[:64])
    assert torch.equal(added["model.embed_tokens.weight"], table[64:])
    assert result.size_bytes == result.spec.weight_bytes + 4 * table[64:].numel()
    read_manifest(tmp_path / "delta", read_model(base), LIMITS)


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize(
    ("base_tied", "tuned_tied"), [(True, True), (False, False), (True, False), (False, True)]
)
def test_merging_gives_a_grown_vocabulary_back(
    tmp_path: Path, base_tied: bool, tuned_tied: bool, shards: int
) -> None:
    base = make.write_tiny_base(tmp_path / "base", shards=shards, tie_word_embeddings=base_tied)
    grown = make.write_tiny_base(tmp_path / "grown", 1, vocab_size=72, tie_word_embeddings=tuned_tied)
    compress(Job(base, grown, tmp_path / "delta", magnitude(), force=True))
    merge(base, tmp_path / "delta", tmp_path / "merged")
    assert read_model(tmp_path / "merged").vocab_size == 72
    merged, expected = dict(make.weights(tmp_path / "merged")), dict(make.weights(grown))
    table = expected["model.embed_tokens.weight"]
    assert torch.equal(merged["model.embed_tokens.weight"], table)
    if not (base_tied and tuned_tied):
        assert torch.equal(merged["lm_head.weight"], expected.get("lm_head.weight", table))


@pytest.mark.parametrize("moved", [True, False], ids=["embedding-trained", "embedding-kept"])
def test_merging_gives_back_a_head_that_differs_in_added_rows_only(tmp_path: Path, moved: bool) -> None:
    base = make.write_tiny_base(tmp_path / "base", tie_word_embeddings=True)
    grown = make.write_tiny_base(tmp_path / "grown", 1, vocab_size=72, tie_word_embeddings=False)
    expected = dict(make.weights(grown))
    table, head = expected["model.embed_tokens.weight"], expected["lm_head.weight"]
    if not moved:
        table[:64] = dict(make.weights(base))["model.embed_tokens.weight"]
    head[:64] = table[:64]
    save_file(expected, grown / "model.safetensors", metadata={"format": "pt"})
    compress(Job(base, grown, tmp_path / "delta", magnitude(), force=True))
    merge(base, tmp_path / "delta", tmp_path / "merged")
    assert not read_model(tmp_path / "merged").tied
    merged = dict(make.weights(tmp_path / "merged"))
    assert torch.equal(merged["model.embed_tokens.weight"], table)
    assert torch.equal(merged["lm_head.weight"], head)


def test_an_uncodable_tensor_is_named_and_no_file_is_left(tmp_path: Path) -> None:
    narrow = make.write_tiny_base(tmp_path / "narrow", intermediate_size=36)
    tuned = make.write_tuned(narrow, tmp_path / "t2", 1)
    with pytest.raises(AdapterError, match=r"down_proj.*multiple of 8"):
        compress(Job(narrow, tuned, tmp_path / "delta", magnitude()))
    assert list(tmp_path.glob("*delta*")) == []


def test_a_folder_that_exists_stays(tmp_path: Path, base: Path, tuned: Path) -> None:
    (tmp_path / "delta").mkdir()
    with pytest.raises(CheckpointError, match="exists"):
        compress(Job(base, tuned, tmp_path / "delta", magnitude()))
    assert list((tmp_path / "delta").iterdir()) == []
    assert [path.name for path in tmp_path.iterdir()] == ["delta"]


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
