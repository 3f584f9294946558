"""Registration's work on real files."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from controlplane import errors
from controlplane.controller.registration import Limits, read_model_files
from controlplane.state.deltas import Delta, Recipe
from controlplane.state.records import Model, Phase
from testkit import random_variants
from testkit.controlplane.builders import base, model, no_bundles, ready_base, variant
from testkit.gemma3_models import write_gemma3
from testkit.random_variants import RandomDelta


def test_a_base_is_registered(files: Path) -> None:
    ready = ready_base(files)
    assert (ready.phase, ready.path) == (Phase.READY, str(files / "base"))
    assert ready.spec is not None
    assert ready.spec.num_layers == 2
    assert "LlamaForCausalLM" in ready.reason


def test_a_variant_is_registered(files: Path) -> None:
    ready = read_model_files(variant(files, "v1"), ready_base(files), Limits((files,), 16), no_bundles)
    assert ready.phase is Phase.READY
    assert ready.variant_spec is not None
    assert (ready.variant_spec.max_rank, set(ready.variant_spec.target_modules)) == (
        4,
        {"q_proj", "down_proj"},
    )


def test_a_bundled_model_is_converted(files: Path) -> None:
    bundled = Model("b", 1, Phase.PROFILING, source="bundled://smollm2-135m-instruct")
    asked: list[str] = []

    def convert(name: str) -> Path:
        asked.append(name)
        return files / "base"

    ready = read_model_files(bundled, None, Limits((), 16), convert)
    assert asked == ["smollm2-135m-instruct"]
    assert ready.path == str(files / "base")


@pytest.mark.parametrize("folder", ["missing", "torn", "v1", "base/config.json"])
def test_an_unreadable_base_is_refused(files: Path, folder: str) -> None:
    with pytest.raises(errors.SourceUnreadable) as refusal:
        read_model_files(base(files, folder), None, Limits((files,), 16), no_bundles)
    assert refusal.value.param == "source"


@pytest.mark.parametrize(
    ("folder", "error"),
    [
        ("missing", errors.SourceUnreadable),
        ("base", errors.OstinatoError),
        ("wide", errors.AdapterMismatch),
        ("strange", errors.AdapterMismatch),
    ],
)
def test_a_variant_that_does_not_do(files: Path, folder: str, error: type[errors.OstinatoError]) -> None:
    with pytest.raises(error) as refusal:
        read_model_files(variant(files, folder), ready_base(files), Limits((files,), 16), no_bundles)
    assert refusal.value.param == "adapter"
    assert 400 <= refusal.value.status < 500


def test_variants_of_gemma3_are_registered(tmp_path: Path) -> None:
    """Made or to be made; of a record that was written when there were none, both say what to do."""
    folder, limits = write_gemma3(tmp_path / "base"), Limits((tmp_path,), 16)
    random_variants.write(folder, tmp_path / "delta", RandomDelta("delta", 4))
    ready = ready_base(tmp_path)
    fine_tune = replace(
        variant(tmp_path, ""), adapter=None, source=str(folder), delta=Delta(Recipe("magnitude"))
    )
    for asked, phase in ((variant(tmp_path, "delta"), Phase.READY), (fine_tune, Phase.COMPRESSING)):
        assert read_model_files(asked, ready, limits, no_bundles).phase is phase
        assert ready.spec is not None
        older = replace(ready, spec=replace(ready.spec, linear_shapes={}))
        with pytest.raises(errors.AdapterMismatch, match="delete the base and register it again"):
            read_model_files(asked, older, limits, no_bundles)


def test_a_rank_above_the_limit(files: Path) -> None:
    with pytest.raises(errors.AdapterMismatch, match="rank"):
        read_model_files(variant(files, "v1"), ready_base(files), Limits((files,), 2), no_bundles)


def test_a_value_that_is_not_finite_is_named(files: Path) -> None:
    with pytest.raises(
        errors.SourceUnreadable, match=r"layers\.1\.mlp\.down_proj\.lora_B.*at \[2, 1\]; train"
    ):
        read_model_files(variant(files, "nan"), ready_base(files), Limits((files,), 16), no_bundles)


def test_a_variant_of_a_deleted_base_is_refused(files: Path) -> None:
    for gone in (None, model("b", Phase.PENDING)):
        with pytest.raises(errors.ModelNotFound):
            read_model_files(variant(files, "v1"), gone, Limits((files,), 16), no_bundles)


def test_adapters_are_not_bundled(files: Path) -> None:
    v = Model("v", 2, Phase.PROFILING, base="b", adapter="bundled://smollm2-135m-instruct")
    with pytest.raises(errors.InvalidRequest):
        read_model_files(v, ready_base(files), Limits((files,), 16), no_bundles)
