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
    requests.see(step({"a": 600, "b": 600, "c": 3}, {"a": 7, "b": None, "c": 9}))
    later = step({"c": 700}, {})
    requests.see(later)
    assert requests.alone(later) == 9
    again = step({"a": 512}, {"a": 8}, finished=("a",))
    requests.see(again)
    assert requests.alone(again) == 8


def test_ended_requests_are_forgotten() -> None:
    requests = Requests()
    requests.see(step({"a": 1}, {"a": 7}))
    last = step({"a": 600}, finished=("a",))
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
    requests.see(step({}, {"a": 7, "b": 7, "c": 9, "base": None}))
    assert requests.alone(step(rows)) == alone


@pytest.fixture(params=RUNNERS, ids=["v1", "v2"])
def runner(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A runner of a class like vLLM's, in a module of that name."""
    module, chooser = request.param

    class GPUModelRunner:
        def __init__(self) -> None:
            setattr(self, chooser, Chooser())
            self.ran: list[Any] = []
            self.dispatched: list[dict[str, Any]] = []

        def execute_model(self, step: Any, *others: Any, fails: bool = False) -> tuple[Any, ...]:
            self.ran.append(step)
            of_variants = {"num_active_loras": 2, **({"has_lora": True} if "dispatcher" in chooser else {})}
            self.dispatched.append(getattr(self, chooser).dispatch(num_tokens=9, **of_variants))
            if fails:
                raise RuntimeError("as if it had failed")
            return (step, *others)

    stand_in = ModuleType(module)
    stand_in.GPUModelRunner = GPUModelRunner  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module, stand_in)
    for other, _ in RUNNERS:
        if other != module:
            monkeypatch.delitem(sys.modules, other, raising=False)
    return GPUModelRunner()


class Chooser:
    """Like what chooses a runner's graphs: it gives back what it was asked for."""

    def dispatch(self, **asked: Any) -> dict[str, Any]:
        return asked


class Engine:
    def __init__(self, as_base: str = "") -> None:
        self._as_base = as_base
        self.asked: list[str] = []

    def choose(self, step: str) -> Graph:
        self.asked.append(step)
        return Graph.OF_THE_BASE if step == self._as_base else Graph.OF_ITS_VARIANTS


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


def test_a_step_s_inputs_and_outputs_are_its_own(runner: Any) -> None:
    engine = Engine(as_base="merged")
    graph_choice.follow(engine.choose)
    assert runner.execute_model("merged", 1) == ("merged", 1)
    assert runner.execute_model("not", 2) == ("not", 2)
    assert runner.ran == engine.asked == ["merged", "not"]


def test_a_later_engine_of_the_process_is_asked_in_place_of_the_first(runner: Any) -> None:
    first, second = Engine(), Engine()
    for engine in (first, second):
        graph_choice.follow(engine.choose)
    runner.execute_model("a")
    graph_choice.follow(None)
    runner.execute_model("b")
    assert (first.asked, second.asked) == ([], ["a"])
    assert runner.ran == ["a", "b"]


def test_an_engine_that_is_gone_is_neither_kept_nor_asked(runner: Any) -> None:
    engine = Engine("a")
    graph_choice.follow(engine.choose)
    gone = weakref.ref(engine)
    del engine
    gc.collect()
    assert gone() is None
    runner.execute_model("a")
    (dispatched,) = runner.dispatched
    assert dispatched["num_active_loras"] == 2
