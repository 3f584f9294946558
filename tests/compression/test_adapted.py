"""Adapters on their base as what is compressed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from profiler.errors import AdapterError
from profiler.variants.types import VariantKind
from profiler.weight_files import locate
from testkit import random_variants as make
from testkit.random_adapters import RandomLora
from testkit.random_variants import EVERY_KIND, RandomVariant, rounded_svd
from workers.compression.job import Job, compress
from workers.compression.layout import all_tensors
from workers.compression.sources import Adapted, Checkpoint, open_source
from workers.deltas.merge import merge
from workers.deltas.tensors import read_tensor

LORA = RandomLora("lora", 4, 1)


def test_a_lora_adds_its_product(tmp_path: Path, base: Path) -> None:
    folder = make.write(base, tmp_path / "lora", LORA)
    source, pairs = open_source(folder, Checkpoint(base)), load_file(folder / "adapter_model.safetensors")
    old = dict(make.weights(base))
    changed = 0
    for name in all_tensors(source.spec):
        a = pairs.get(f"base_model.model.{name.removesuffix('.weight')}.lora_A.weight")
        if a is None:
            assert torch.equal(source.tensor(name), old[name]), name
            continue
        b = pairs[f"base_model.model.{name.removesuffix('.weight')}.lora_B.weight"]
        expected = old[name].double() + LORA.alpha / LORA.rank * (b.double() @ a.double())
        assert torch.allclose(source.tensor(name).double(), expected, atol=1e-6), name
        changed += 1
    assert changed == 14


@pytest.mark.parametrize("variant", EVERY_KIND, ids=lambda variant: variant.name)
def test_every_kind_is_read_as_merging_writes_it(tmp_path: Path, base: Path, variant: RandomVariant) -> None:
    folder = make.write(base, tmp_path / "variant", variant)
    merge(base, folder, tmp_path / "merged")
    source = open_source(folder, Checkpoint(base))
    for name, ref in locate(tmp_path / "merged").items():
        assert torch.allclose(source.tensor(name), read_tensor(tmp_path / "merged", ref), atol=1e-6), name


def test_a_lora_becomes_a_delta_of_its_rank(tmp_path: Path, base: Path) -> None:
    """All ranks of a rank-4 change fit: what is lost is rounding, two of them to 3 bits."""
    folder = make.write(base, tmp_path / "lora", LORA)
    result = compress(Job(base, folder, tmp_path / "delta", rounded_svd(1.0)))
    assert result.spec is not None
    assert result.spec.kind is VariantKind.SVD_DELTA
    assert result.spec.full_bytes == 0
    merge(base, folder, tmp_path / "lora-merged")
    merge(base, tmp_path / "delta", tmp_path / "delta-merged")
    exact, near = (dict(make.weights(tmp_path / f"{kind}-merged")) for kind in ("lora", "delta"))
    for name, old in make.weights(base):
        lost, whole = (near[name] - exact[name]).norm(), (exact[name] - old).norm()
        assert lost <= 0.25 * whole, name


def test_a_lora_of_other_shapes_is_refused(tmp_path: Path, base: Path) -> None:
    wider = make.write_tiny_base(tmp_path / "wider", intermediate_size=64)
    folder = make.write(wider, tmp_path / "lora", LORA)
    with pytest.raises(AdapterError):
        compress(Job(base, folder, tmp_path / "delta", rounded_svd()))
    assert list(tmp_path.glob("*delta*")) == []


def test_identities_tell_adapters_and_bases_apart(tmp_path: Path, base: Path) -> None:
    other = make.write_tiny_base(tmp_path / "other", 5)
    first = make.write(base, tmp_path / "first", LORA)
    second = make.write(base, tmp_path / "second", RandomLora("second", 4, 2))
    again = make.write(base, tmp_path / "again", LORA)
    found = [
        Adapted(Checkpoint(at), folder).identity
        for at, folder in ((base, first), (base, second), (other, first), (base, again))
    ]
    assert len(set(found)) == 3
    assert found[0] == found[3]
