"""Embedding and head as differences: what is lost, where that is too much, and every form of a fine-tune."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from profiler.checkpoint import read_model
from profiler.variants.reading import read_manifest
from profiler.variants.types import VariantLimits
from testkit import random_variants as make
from workers.compression.job import Job, compress
from workers.compression.methods.magnitude import magnitude
from workers.compression.sources import open_source
from workers.deltas import differences
from workers.deltas.merge import merge

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
ROWS, SAME, ADDED = 64, 5, 8


def near(table: torch.Tensor, seed: int) -> torch.Tensor:
    """Changed by a hundredth, but for some rows."""
    made = table + 0.01 * torch.randn(table.shape, generator=torch.Generator().manual_seed(seed)).to(table)
    made[:SAME] = table[:SAME]
    return made.to(table.dtype)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("added", [0, ADDED])
@pytest.mark.parametrize(("base_tied", "tuned_tied"), [(True, True), (False, False), (True, False)])
def test_the_decoded_weights_are_the_fine_tune_s_within_half_a_step(
    tmp_path: Path, base_tied: bool, tuned_tied: bool, added: int, dtype: str
) -> None:
    """Merged, and as a fine-tune to compress further; a head of its own on a tied base, and added tokens."""
    base = make.write_tiny_base(tmp_path / "base", tie_word_embeddings=base_tied, torch_dtype=dtype)
    old = dict(make.weights(base))
    heads = {} if base_tied else {HEAD: old[HEAD]}
    tables = {
        EMBEDDING: old[EMBEDDING],
        **heads,
        **({} if tuned_tied else {HEAD: old.get(HEAD, old[EMBEDDING])}),
    }
    new = {name: near(table, number) for number, (name, table) in enumerate(tables.items())}
    grown = {
        name: torch.cat([table, torch.ones(added, table.shape[1]).to(table)]) for name, table in new.items()
    }
    size = ROWS + added
    settings: dict[str, Any] = {"tie_word_embeddings": tuned_tied, "torch_dtype": dtype, "vocab_size": size}
    tuned = make.write_tiny_base(tmp_path / "tuned", **settings)
    kept = {name: weight for name, weight in old.items() if name not in tables}
    save_file({**kept, **grown}, tuned / "model.safetensors", metadata={"format": "pt"})

    folder = tmp_path / "delta"
    compress(Job(base, tuned, folder, magnitude()))
    manifest = read_manifest(folder, read_model(base), VariantLimits(0))
    assert manifest.differences.keys() == tables.keys()
    merge(base, folder, tmp_path / "merged")
    merged, source = dict(make.weights(tmp_path / "merged")), open_source(folder, open_source(base))
    for name, table in tables.items():
        for found in (merged[name], source.tensor(name)):
            assert found.dtype == table.dtype
            assert_near(found[:ROWS], new[name], table)
        assert torch.equal(merged[name][ROWS:], grown[name][ROWS:])


def assert_near(found: torch.Tensor, tuned: torch.Tensor, base: torch.Tensor) -> None:
    """Half of one in 127 to a row's largest change, and the type's own rounding."""
    step = (tuned.double() - base.double()).abs().amax(dim=1, keepdim=True) / 127
    off = (found.double() - tuned.double()).abs()
    assert (off <= 0.501 * step + torch.finfo(tuned.dtype).eps * tuned.double().abs()).all()
    assert torch.equal(found[:SAME], base[:SAME])


def table(rows: int = 400) -> torch.Tensor:
    return torch.randn(rows, 256, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(
    ("change", "kept"),
    [
        (0.05, True),
        # The largest of 256 numbers is 2.9 times their spread, so that a step is 2.9 / 127 of it, and loses
        # 1 / sqrt(12) of that: 0.0066 of a change. Rounding to bfloat16 loses 0.00166 of a weight.
        (0.20, True),
        (0.30, False),
    ],
)
def test_a_difference_may_lose_what_bfloat16_loses(change: float, kept: bool) -> None:
    base = table()
    tuned = base + change * torch.randn(base.shape, generator=torch.Generator().manual_seed(2))
    assert differences.keeps(base, tuned) is kept


def test_some_rows_that_the_base_hardly_had_have_eight_bits_of_themselves() -> None:
    """Too many of them are too much for the whole; one of a single large number is for itself."""
    base = table()
    tuned = base + 0.01 * torch.randn(base.shape, generator=torch.Generator().manual_seed(2))
    for rows, kept in ((8, True), (200, False)):
        without = base.clone()
        without[:rows] *= 1e-3
        assert differences.keeps(without, tuned) is kept
    uneven, lumpy = base.clone(), tuned.clone()
    uneven[3], lumpy[3] = 0.0, 1e-3 * tuned[3]
    lumpy[3, 7] = 1.0
    assert not differences.keeps(uneven, lumpy)


def test_rows_come_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    base = table(10)
    tuned = base + 0.05
    whole = differences.encode(base, tuned)
    again = differences.decode(base, *whole, torch.bfloat16)
    monkeypatch.setattr(differences, "CHUNK", 3 * 256)
    pieces = differences.encode(base, tuned)
    assert all(torch.equal(one, other) for one, other in zip(whole, pieces, strict=True))
    assert torch.equal(differences.decode(base, *pieces, torch.bfloat16), again)
    assert again.dtype == torch.bfloat16
