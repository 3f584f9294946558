"""Which graph a step runs from, on stand-ins for vLLM's two runners: what they choose by is theirs."""

from __future__ import annotations

import gc
import sys
import weakref
from types import ModuleType
from typing import Any

import pytest

from workers.patches.vllm import graph_choice
from workers.patches.vllm.graph_choice import RUNNERS, Graph


@pytest.fixture(params=RUNNERS, ids=["v1", "v2"])
def runner(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A runner of a class like vLLM's, in a module of that name."""
    target, chooser, _ = request.param

    class GPUModelRunner:
        def __init__(self) -> None:
            setattr(self, chooser, Chooser())
            self.ran: list[Any] = []
            self.dispatched: list[dict[str, Any]] = []

        def execute_model(self, scheduler_output: Any, *others: Any, fails: bool = False) -> tuple[Any, ...]:
            self.ran.append(scheduler_output)
            of_variants = {"num_active_loras": 2, **({"has_lora": True} if "dispatcher" in chooser else {})}
            self.dispatched.append(getattr(self, chooser).dispatch(num_tokens=9, **of_variants))
            if fails:
                raise RuntimeError("as if it had failed")
            return (scheduler_output, *others)

    stand_in = ModuleType(target.module)
    stand_in.GPUModelRunner = GPUModelRunner  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, target.module, stand_in)
    for other, _, _ in RUNNERS:
        if other != target:
            monkeypatch.delitem(sys.modules, other.module, raising=False)
    return GPUModelRunner()


class Chooser:
    """Like what chooses a runner's graphs: it gives back what it was asked for."""

    def dispatch(self, num_tokens: int, num_active_loras: int, **more: Any) -> dict[str, Any]:
        return {"num_tokens": num_tokens, "num_active_loras": num_active_loras, **more}


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
