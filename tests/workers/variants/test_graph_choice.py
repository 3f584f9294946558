"""Which graph a step runs from, on stand-ins for vLLM's two runners: what they choose by is theirs."""

from __future__ import annotations

import gc
import sys
import weakref
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from workers.variants import graph_choice
from workers.variants.alone import BASE_UID
from workers.variants.graph_choice import RUNNERS, Graph, Requests


def step(
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
    first = step({"a": 600, "b": 600, "c": 3}, {"a": 7, "b": None, "c": 9})
    requests.see(first)
    assert requests.of_at_least(512, first) == {7}
    later = step({"a": 1, "c": 700}, {})
    requests.see(later)
    assert requests.of_at_least(512, later) == {9}
    again = step({"a": 600, "c": 512}, {"a": 8}, finished=("a",))
    requests.see(again)
    assert requests.of_at_least(512, again) == {8, 9}


def test_what_ended_is_forgotten() -> None:
    requests = Requests()
    requests.see(step({"a": 1}, {"a": 7}))
    last = step({"a": 600}, finished=("a",))
    requests.see(last)
    assert requests.of_at_least(1, last) == set()


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
def test_a_variant_is_alone_if_nobody_asks_for_anything_else(rows: dict[str, int], alone: int) -> None:
    requests = Requests()
    requests.see(step({}, {"a": 7, "b": 7, "c": 9, "base": None}))
    assert requests.alone(step(rows)) == alone


@pytest.fixture(params=RUNNERS, ids=["v1", "v2"])
def runner(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A runner of a class like vLLM's, in a module of that name."""
    module, chooser, flag = request.param

    class GPUModelRunner:
        def __init__(self) -> None:
            setattr(self, chooser, Chooser(flag))
            self.flags: list[bool] = []
            self.dispatched: list[dict[str, Any]] = []

        def execute_model(self, step: Any, *others: Any, fails: bool = False) -> tuple[Any, ...]:
            self.flags.append(self.finds_graphs)
            of_variants = {"num_active_loras": 2, **({"has_lora": True} if "dispatcher" in chooser else {})}
            self.dispatched.append(getattr(self, chooser).dispatch(num_tokens=9, **of_variants))
            if fails:
                raise RuntimeError("as if it had failed")
            return (step, *others)

        @property
        def finds_graphs(self) -> bool:
            return bool(getattr(getattr(self, chooser), flag))

    stand_in = ModuleType(module)
    stand_in.GPUModelRunner = GPUModelRunner  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module, stand_in)
    for other, _, _ in RUNNERS:
        if other != module:
            monkeypatch.delitem(sys.modules, other, raising=False)
    return GPUModelRunner()


class Chooser:
    """Like what chooses a runner's graphs: it gives back what it was asked for."""

    def __init__(self, flag: str) -> None:
        setattr(self, flag, True)

    def dispatch(self, **asked: Any) -> dict[str, Any]:
        return asked


class Engine:
    def __init__(self, *merging: str, as_base: str = "") -> None:
        self._merging, self._as_base = merging, as_base

    def choose(self, step: str) -> Graph:
        if step == self._as_base:
            return Graph.OF_THE_BASE
        return Graph.NONE if step in self._merging else Graph.OF_ITS_VARIANTS


def test_a_step_of_a_merged_variant_finds_the_bases_graph(runner: Any) -> None:
    engine = Engine(as_base="merged")
    graph_choice.follow(engine.choose)
    for name in ("merged", "not"):
        runner.execute_model(name)
    with pytest.raises(RuntimeError, match="as if"):
        runner.execute_model("merged", fails=True)
    runner.execute_model("not")
    has_lora = [{"has_lora": value} if "has_lora" in runner.dispatched[0] else {} for value in (False, True)]
    as_base = {"num_tokens": 9, "num_active_loras": 0, **has_lora[0]}
    as_it_is = {"num_tokens": 9, "num_active_loras": 2, **has_lora[1]}
    assert runner.dispatched == [as_base, as_it_is, as_base, as_it_is]
    assert runner.flags == [True] * 4


def test_a_step_that_merges_finds_no_graph(runner: Any) -> None:
    engine = Engine("merges")
    graph_choice.follow(engine.choose)
    assert runner.execute_model("merges", 1) == ("merges", 1)
    assert runner.execute_model("not", 2) == ("not", 2)
    assert runner.flags == [False, True]
    assert runner.finds_graphs


def test_graphs_are_found_again_after_a_failure(runner: Any) -> None:
    engine = Engine("merges")
    graph_choice.follow(engine.choose)
    with pytest.raises(RuntimeError, match="as if"):
        runner.execute_model("merges", fails=True)
    assert runner.finds_graphs


def test_a_later_engine_of_the_process_is_asked_in_place_of_the_first(runner: Any) -> None:
    first, second = Engine("a"), Engine("b")
    for engine in (first, second):
        graph_choice.follow(engine.choose)
    runner.execute_model("a")
    runner.execute_model("b")
    graph_choice.follow(None)
    runner.execute_model("b")
    assert runner.flags == [True, False, True]


def test_an_engine_that_is_gone_is_neither_kept_nor_asked(runner: Any) -> None:
    engine = Engine("a")
    graph_choice.follow(engine.choose)
    gone = weakref.ref(engine)
    del engine
    gc.collect()
    assert gone() is None
    runner.execute_model("a")
    assert runner.flags == [True]


def test_before_there_are_graphs_there_are_none_afterwards(runner: Any) -> None:
    """vLLM sets the flag when it has captured them."""
    for _, chooser, flag in RUNNERS:
        if hasattr(runner, chooser):
            setattr(getattr(runner, chooser), flag, False)
    engine = Engine("a dummy run")
    graph_choice.follow(engine.choose)
    runner.execute_model("a dummy run")
    assert not runner.finds_graphs
