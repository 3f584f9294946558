"""Tables of kinds of variants have every kind: a kind that a table lacks fails only when it is used."""

from __future__ import annotations

import pytest

from profiler.step_time.records import KIND_NUMBERS, KINDS
from profiler.variants.types import VariantKind
from workers.variants.kinds import _KINDS
from workers.variants.operators import operations_for


@pytest.mark.parametrize("kind", VariantKind)
def test_an_engine_reads_and_computes_the_kind(kind: VariantKind) -> None:
    assert kind in _KINDS
    assert operations_for([kind.value])


def test_every_kind_has_a_number_in_step_models() -> None:
    assert sorted(KIND_NUMBERS) == sorted(VariantKind)
    assert sorted(KIND_NUMBERS.values()) == list(range(KINDS))
