"""Registering variants of every kind: what is kept of them, and what the API shows."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from controlplane import errors
from controlplane.controller.registration import Limits, read_model_files
from controlplane.management.schemas.models import ModelView
from controlplane.planning import accuracy
from controlplane.state.records import Model, Phase, dump, load
from profiler.variants.delta import DELTA
from profiler.variants.types import VariantKind
from testkit import random_variants as make
from testkit.controlplane.builders import no_bundles
from testkit.random_variants import EVERY_KIND, RandomVariant

WORDS = {
    VariantKind.LORA: r"LoRA of rank \d+ on q_proj",
    VariantKind.BOFT: r"BOFT of [12] factors, blocks of (8|16) on",
    VariantKind.SPARSE_DELTA: "2:4 sparse delta of [24] bits",
    VariantKind.SVD_DELTA: "low-rank delta of rank .* bits",
}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Model:
    folder = make.write_tiny_base(tmp_path_factory.mktemp("models") / "base")
    registered = Model("b", 1, Phase.PROFILING, source=str(folder))
    return read_model_files(registered, None, Limits((folder.parent,), 16), no_bundles)


@pytest.mark.parametrize("variant", EVERY_KIND, ids=lambda variant: variant.name)
def test_every_kind_is_registered_and_shown(base: Model, variant: RandomVariant) -> None:
    assert base.path is not None
    root = Path(base.path).parent
    folder = make.write(Path(base.path), root / variant.name, variant)
    asked = Model("v", 2, Phase.PROFILING, base="b", adapter=f"file://{folder}")
    ready = read_model_files(asked, base, Limits((root,), 16), no_bundles)
    assert ready.phase is Phase.READY
    spec = ready.variant_spec
    assert spec is not None
    assert re.match(WORDS[spec.kind], ready.reason)
    assert load(Model, dump(ready)) == ready
    view = ModelView.of(ready, False, [])
    assert (view.kind, view.path, view.weightBytes) == (spec.kind, str(folder), spec.weight_bytes)
    assert view.variant is not None
    assert tuple(view.variant.modules) == spec.target_modules
    assert ModelView.of(asked, False, []).kind is None
    assert ModelView.of(base, False, []).kind == "base"


def test_a_delta_of_another_base_is_a_mismatch(base: Model) -> None:
    assert base.path is not None
    root = Path(base.path).parent
    other = make.write_tiny_base(root / "other", 7)
    folder = make.write(other, root / "of-other", make.RandomDelta("d", 1))
    asked = Model("v", 2, Phase.PROFILING, base="b", adapter=str(folder))
    with pytest.raises(errors.AdapterMismatch, match="made from the base"):
        read_model_files(asked, base, Limits((root,), 16), no_bundles)
    assert base.spec is not None
    early = replace(base, spec=replace(base.spec, fingerprint=""))
    with pytest.raises(errors.AdapterMismatch, match="register it again"):
        read_model_files(asked, early, Limits((root,), 16), no_bundles)


LOSS = {"task": "sums", "metric": "exact_match", "before": 0.8, "after": 0.6, "value": 20.0, "low": 15.0}
PERPLEXITY = {
    "task": "prose",
    "metric": "perplexity",
    "before": 9.0,
    "after": 10.0,
    "value": 11.1,
    "low": 1.0,
}


def registered_with(base: Model, folder: Path, quality: Any, **given: Any) -> Model:
    """A delta whose delta.json has this `quality`."""
    assert base.path is not None
    make.write(Path(base.path), folder, make.RandomDelta("d", 1))
    raw = json.loads((folder / DELTA).read_text())
    (folder / DELTA).write_text(json.dumps({**raw, "quality": quality}))
    asked = Model("v", 2, Phase.PROFILING, base="b", adapter=str(folder), **given)
    return read_model_files(asked, base, Limits((folder.parent,), 16), no_bundles)


def test_a_delta_s_accuracy_is_the_measured_share_that_it_keeps(base: Model, tmp_path: Path) -> None:
    losses = [{**each, "high": None, "items": 5, "digest": "d"} for each in (PERPLEXITY, LOSS)]
    ready = registered_with(base, tmp_path / "measured", losses)
    assert accuracy.of_variant(ready) == pytest.approx(75)  # 0.6 of 0.8, which is less than 9 of 10
    assert "keeps 75.0% of its accuracy" in ready.reason


def test_the_user_s_stated_accuracy_replaces_the_measured_one(base: Model, tmp_path: Path) -> None:
    losses = [{**LOSS, "high": 25.0, "items": 5}]
    ready = registered_with(base, tmp_path / "said", losses, compression={"none": 99.0})
    assert accuracy.of_variant(ready) == 99


@pytest.mark.parametrize(
    "quality",
    [
        "good",
        [3],
        [{"task": "sums"}],
        [{**LOSS, "high": 25.0, "items": 5, "before": "most"}],
        [{**LOSS, "high": 25.0, "items": 5, "after": -1}],
        [{**PERPLEXITY, "high": 25.0, "items": 5, "after": 0.5}],
    ],
)
def test_a_measurement_that_cannot_be_read_is_refused(base: Model, tmp_path: Path, quality: Any) -> None:
    with pytest.raises(errors.SourceUnreadable, match="quality"):
        registered_with(base, tmp_path / "bad", quality)
