"""The choice of how a step computes its variants, and that the base's weights are those it needs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.patches.vllm.graph_choice import Graph
from workers.variants.alone import BASE_UID, COST, ROWS
from workers.variants.step_choice import Requests, StepChoice

SPARSE, OTHER_SPARSE, LORA, BOFT, STAND_IN, ELSEWHERE = 7, 12, 8, 9, 10, 11
LONG = round(COST * ROWS)  # rows that are merged at once
CACHE: Any = SimpleNamespace(
    slot_of={SPARSE: 0, LORA: 1, BOFT: 2, OTHER_SPARSE: 3},
    operations_of={
        SPARSE: {"sparse_delta", "norm"},
        OTHER_SPARSE: {"sparse_delta"},
        LORA: {"lora"},
        BOFT: {"boft", "bias"},
    },
)


class Slot:
    """Stands in for a `MergedSlot`: notes whose weights the base's are."""

    def __init__(self) -> None:
        self.holds = BASE_UID

    def takes(self, uid: int, slot: int, operations: set[str]) -> bool:
        assert CACHE.slot_of[uid] == slot
        return "sparse_delta" in operations

    def merge(self, uid: int, slot: int) -> None:
        assert CACHE.slot_of[uid] == slot
        assert uid != self.holds
        self.holds = uid

    def restore(self) -> None:
        assert self.holds != BASE_UID
        self.holds = BASE_UID


def made(slot: Any = None) -> StepChoice:
    """An engine with variants in slots, and a stand-in for one."""
    return StepChoice(CACHE, slot)


def step(rows: dict[str, int], **uids: int) -> Any:
    new = [
        SimpleNamespace(
            req_id=name, lora_request=SimpleNamespace(lora_int_id=uids[name]) if name in uids else None
        )
        for name in rows
    ]
    return SimpleNamespace(num_scheduled_tokens=rows, scheduled_new_reqs=new, finished_req_ids=set())


@pytest.mark.parametrize("uids", [{"a": SPARSE}, {"a": LORA}, {}])
def test_every_step_runs_as_in_vllm_without_a_merged_slot(uids: dict[str, int]) -> None:
    assert made().choose(step({"a": LONG}, **uids)) is Graph.OF_ITS_VARIANTS


def test_a_long_prompt_alone_is_merged_in_the_bases_place_if_there_is_a_slot() -> None:
    slot = Slot()
    steps = made(slot)
    assert steps.choose(step({"a": LONG}, a=SPARSE)) is Graph.OF_THE_BASE
    assert steps.put_weights({SPARSE})
    assert slot.holds == SPARSE


@pytest.mark.parametrize("beside", [None, LORA, OTHER_SPARSE])
def test_the_base_is_back_as_soon_as_another_comes(beside: int | None) -> None:
    slot = Slot()
    steps = made(slot)
    steps.choose(step({"a": LONG}, a=SPARSE))
    steps.put_weights({SPARSE})
    other = {} if beside is None else {"b": beside}
    assert steps.choose(step({"a": 1, "b": 1}, a=SPARSE, **other)) is Graph.OF_ITS_VARIANTS
    assert not steps.put_weights({SPARSE, *(other.values() or {BASE_UID})})
    assert slot.holds == BASE_UID


@pytest.mark.parametrize("uid", [LORA, BOFT, ELSEWHERE, STAND_IN])
def test_no_other_kind_is_merged_nor_what_is_in_no_slot(uid: int) -> None:
    slot = Slot()
    steps = made(slot)
    for _ in range(20):
        assert steps.choose(step({"a": LONG}, a=uid)) is Graph.OF_ITS_VARIANTS
        assert not steps.put_weights({uid})
    assert slot.holds == BASE_UID


def test_stand_ins_find_the_bases_weights_and_the_next_step_its_variants() -> None:
    """vLLM's dummy runs come between steps, and no choice is made for them."""
    slot = Slot()
    steps = made(slot)
    steps.choose(step({"a": LONG}, a=SPARSE))
    steps.put_weights({SPARSE})
    assert not steps.put_weights(set())
    assert slot.holds == BASE_UID
    assert steps.choose(step({"a": 1}, a=SPARSE)) is Graph.OF_THE_BASE
    assert steps.put_weights({SPARSE})
    assert slot.holds == SPARSE


def test_a_step_of_nothing_changes_nothing() -> None:
    slot = Slot()
    steps = made(slot)
    steps.choose(step({"a": LONG}, a=SPARSE))
    steps.put_weights({SPARSE})
    steps.choose(step({}))
    assert steps.choose(step({"a": 1}, a=SPARSE)) is Graph.OF_THE_BASE


def test_rows_of_others_never_run_from_the_bases_graph() -> None:
    for rows in ({LORA}, {SPARSE, LORA}, {SPARSE, BASE_UID}):
        steps = made(Slot())
        steps.choose(step({"a": LONG}, a=SPARSE))
        with pytest.raises(RuntimeError, match="alone"):
            steps.put_weights(rows)


@given(
    st.lists(
        st.dictionaries(
            st.sampled_from("abcd"),
            st.tuples(st.sampled_from([0, SPARSE, OTHER_SPARSE, LORA]), st.integers(1, LONG)),
            max_size=3,
        ),
        max_size=30,
    )
)
def test_every_step_has_the_weights_that_its_graph_assumes(
    steps: list[dict[str, tuple[int, int]]],
) -> None:
    """Every request is looked up in a step of its own, under a name of its own."""
    slot = Slot()
    chosen = made(slot)
    for number, asked in enumerate(steps):
        rows = {f"{name}{number}": count for name, (_, count) in asked.items()}
        of = {f"{name}{number}": uid for name, (uid, _) in asked.items() if uid}
        graph = chosen.choose(step(rows, **of))
        if not rows:
            continue
        uids = {uid for uid, _ in asked.values()}
        as_base = chosen.put_weights(uids)
        assert as_base == (graph is Graph.OF_THE_BASE)
        assert slot.holds == (next(iter(uids)) if as_base else BASE_UID)
        assert not as_base or uids in ({SPARSE}, {OTHER_SPARSE})


def scheduled(
    rows: dict[str, int], new: dict[str, int | None] | None = None, finished: tuple[str, ...] = ()
) -> Any:
    """vLLM's SchedulerOutput. `new`: the variant of each request that begins, None for the base."""
    asked = [
        SimpleNamespace(req_id=name, lora_request=uid and SimpleNamespace(lora_int_id=uid))
        for name, uid in (new or {}).items()
    ]
    return SimpleNamespace(
        num_scheduled_tokens=rows, scheduled_new_reqs=asked, finished_req_ids=set(finished)
    )


def test_requests_keep_their_variants_from_their_first_step_on() -> None:
    requests = Requests()
    requests.see(scheduled({"a": 600, "b": 600, "c": 3}, {"a": 7, "b": None, "c": 9}))
    later = scheduled({"c": 700}, {})
    requests.see(later)
    assert requests.alone(later) == 9
    again = scheduled({"a": 512}, {"a": 8}, finished=("a",))
    requests.see(again)
    assert requests.alone(again) == 8


def test_ended_requests_are_forgotten() -> None:
    requests = Requests()
    requests.see(scheduled({"a": 1}, {"a": 7}))
    last = scheduled({"a": 600}, finished=("a",))
    requests.see(last)
    assert requests.alone(last) == BASE_UID


@pytest.mark.parametrize(
    ("rows", "alone"),
    [
        ({"a": 1}, 7),
        ({"a": 1, "b": 4}, 7),
        ({"a": 1, "c": 1}, BASE_UID),
        ({"a": 1, "base": 1}, BASE_UID),
        ({"base": 1}, BASE_UID),
        ({}, BASE_UID),
    ],
)
def test_a_variant_is_alone_if_all_requests_are_for_it(rows: dict[str, int], alone: int) -> None:
    requests = Requests()
    requests.see(scheduled({}, {"a": 7, "b": 7, "c": 9, "base": None}))
    assert requests.alone(scheduled(rows)) == alone
