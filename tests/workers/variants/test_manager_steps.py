"""Which of vLLM's steps the manager has run without a graph."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from workers.kernels.sparse_delta import merging
from workers.variants.graph_choice import Requests
from workers.variants.manager import VariantManager

SPARSE, LORA, BOFT, STAND_IN, ELSEWHERE = 7, 8, 9, 10, 11
ENOUGH = merging.UNGRAPHED_FROM


@pytest.fixture
def manager() -> Any:
    """Of an engine of a 7B's weights with a variant of each kind in a slot, and a stand-in for one."""
    made: Any = object.__new__(VariantManager)
    made._weight_bytes = merging.MEASURED_BYTES
    made._requests, made._dummies, made._ungraphed = Requests(), {STAND_IN: 3}, False
    operations = {SPARSE: {"sparse_delta", "norm"}, LORA: {"lora"}, BOFT: {"boft", "bias"}}
    made.variant_cache = SimpleNamespace(slot_of={SPARSE: 0, LORA: 1, BOFT: 2}, operations_of=operations)
    return made


def step(rows: dict[str, int], **uids: int) -> Any:
    new = [
        SimpleNamespace(
            req_id=name, lora_request=SimpleNamespace(lora_int_id=uids[name]) if name in uids else None
        )
        for name in rows
    ]
    return SimpleNamespace(num_scheduled_tokens=rows, scheduled_new_reqs=new, finished_req_ids=set())


@pytest.mark.parametrize(
    ("rows", "uids", "merges"),
    [
        ({"a": ENOUGH}, {"a": SPARSE}, True),
        ({"a": ENOUGH - 1}, {"a": SPARSE}, False),
        ({"a": ENOUGH}, {"a": LORA}, False),
        ({"a": ENOUGH}, {"a": STAND_IN}, False),
        ({"a": ENOUGH}, {"a": ELSEWHERE}, False),
        ({"a": ENOUGH}, {}, False),
        ({"a": ENOUGH, "b": 1}, {"a": SPARSE, "b": LORA}, True),
        ({"a": ENOUGH, "b": 1}, {"a": SPARSE, "b": BOFT}, False),
    ],
)
def test_those_in_which_a_sparse_delta_has_many_rows(
    manager: Any, rows: dict[str, int], uids: dict[str, int], merges: bool
) -> None:
    assert manager._merges(step(rows, **uids)) == merges
    assert manager._ungraphed == merges


def test_beside_many_requests_fewer_rows_are_enough(manager: Any) -> None:
    others = {f"other {n}": 1 for n in range(merging.BUSY - 1)}
    assert manager._merges(step({"a": merging.UNGRAPHED_FROM_BUSY, **others}, a=SPARSE))
    assert not manager._merges(step({"a": 1, **others}, a=SPARSE))
