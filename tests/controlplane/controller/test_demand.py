"""The gateways' counts, remembered: engines that start, silences, waiting variants, bounds."""

from __future__ import annotations

from dataclasses import replace

import pytest

from controlplane.controller.demand import DemandBook
from controlplane.planning.autoscaling import resized
from controlplane.state.records import Deployment, Phase, Scaling
from controlplane.state.worker_groups import GroupPhase, WorkerGroup
from testkit.controlplane import builders

IDLE_S = 30.0


def base(scaling: Scaling, *phases: GroupPhase, failures: int = 0) -> Deployment:
    return replace(
        builders.deployment("b", Phase.DEPLOYED),
        established=True,
        scaling=scaling,
        groups=tuple(WorkerGroup(n, phase, failures=failures) for n, phase in enumerate(phases)),
    )


def sleeping() -> Deployment:
    return base(Scaling(0, 1, None, IDLE_S))


def play(book: DemandBook, deployment: Deployment, load: float | None, *seconds: int) -> list[int]:
    """The target number of groups in each of these seconds; None: the gateways were silent."""
    counts = None if load is None else {"b": load}
    return [book.note([deployment], counts, float(s)).get("b", -1) for s in range(*seconds)]


def test_a_starting_group_is_not_idle_and_stays_for_a_while_when_it_serves() -> None:
    """Its client waits two minutes, its engine loads for four."""
    book, starts = DemandBook(), base(Scaling(0, 1, None, IDLE_S), GroupPhase.STARTING)
    assert play(book, sleeping(), 1, 10, 11) == [1]
    assert set(play(book, starts, 1, 11, 130)) == {1}
    assert set(play(book, starts, 0, 130, 251)) == {1}
    serves = base(Scaling(0, 1, None, IDLE_S), GroupPhase.SERVING)
    counts = play(book, serves, 0, 251, 300)
    assert counts == [1] * 29 + [0] * 20


@pytest.mark.parametrize(("phase", "failures"), [(GroupPhase.PENDING, 0), (GroupPhase.STARTING, 2)])
def test_a_group_without_room_or_start_goes_when_no_request_comes(phase: GroupPhase, failures: int) -> None:
    book, waits = DemandBook(), base(Scaling(0, 1, None, IDLE_S), phase, failures=failures)
    assert play(book, sleeping(), 1, 1) == [1]
    counts = play(book, waits, 0, 1, 61)
    assert counts == [1] * 29 + [0] * 31


def test_a_sleeping_base_is_woken_for_a_variant_that_waits_to_be_served() -> None:
    book = DemandBook()
    variant = builders.deployment("v", Phase.PENDING, base="b")
    assert book.note([sleeping(), variant], {}, 0.0) == {"b": 1}
    for served in (replace(variant, established=True), replace(variant, phase=Phase.DELETING)):
        assert book.note([sleeping(), served], {}, 1.0) == {"b": 0}


def test_after_a_silence_one_sample_decides_nothing() -> None:
    four, one = (base(Scaling(1, 4, 16.0), *[GroupPhase.SERVING] * n) for n in (4, 1))
    for deployment, load, then in ((four, 60, 0), (one, 5, 60)):
        book, there = DemandBook(), len(deployment.groups)
        assert set(play(book, deployment, load, 120)) == {there}
        assert set(play(book, deployment, None, 120, 185)) == {there}
        assert set(play(book, deployment, then, 185, 190)) == {there}


def test_a_silence_counts_neither_as_load_nor_as_idleness() -> None:
    book, awake = DemandBook(), base(Scaling(0, 4, 16.0, IDLE_S), GroupPhase.SERVING)
    play(book, awake, 10, 100)
    assert set(play(book, awake, None, 100, 165)) == {1}
    assert play(book, awake, 0, 165, 200) == [1] * 30 + [0] * 5


def test_a_short_silence_forgets_nothing() -> None:
    book, one = DemandBook(), base(Scaling(1, 4, 16.0), GroupPhase.SERVING)
    play(book, one, 40, 4)
    play(book, one, None, 4, 7)
    assert play(book, one, 40, 7, 8) == [3]


def test_a_clock_that_was_set_back_starts_the_history_again() -> None:
    book, one = DemandBook(), base(Scaling(1, 4, 16.0), GroupPhase.SERVING)
    play(book, one, 5, 1000, 1020)
    assert set(play(book, one, 60, 10, 15)) == {1}
    assert play(book, one, 60, 15, 16) == [4]


@pytest.mark.parametrize("load", [None, 0.0])
def test_bounds_hold_at_once_and_in_a_silence(load: float | None) -> None:
    for scaling, there, wanted in ((Scaling(3, 4), 1, 3), (Scaling(1, 2), 4, 2), (Scaling(2, 2), 0, 2)):
        deployment = base(scaling, *[GroupPhase.SERVING] * there)
        book = DemandBook()
        assert book.note([deployment], None if load is None else {}, 0.0) == {"b": wanted}
        assert book.wanted(deployment) == wanted
        assert book.note([resized(deployment, wanted)], None, 1.0) == {"b": wanted}


def test_a_silence_neither_wakes_nor_puts_to_sleep() -> None:
    for deployment in (sleeping(), base(Scaling(0, 1, None, 1.0), GroupPhase.SERVING)):
        assert set(play(DemandBook(), deployment, None, 100)) == {len(deployment.groups)}


def test_a_target_near_zero_stops_no_other_deployment() -> None:
    odd = replace(base(Scaling(1, 3, 1e-308), GroupPhase.SERVING))
    other = replace(odd, model="good", base="good", scaling=Scaling(1, 3, 16.0))
    book = DemandBook()
    for second in range(8):
        found = book.note([odd, other], {"b": 17.0, "good": 17.0}, float(second))
    assert found == {"b": 3, "good": 2}


def test_a_deployment_that_never_served_is_not_scaled() -> None:
    early = replace(base(Scaling(1, 4), GroupPhase.STARTING), established=False)
    assert book_of(early) == {}
    assert DemandBook().wanted(early) == 1


def book_of(deployment: Deployment) -> dict[str, int]:
    return DemandBook().note([deployment], {"b": 99.0}, 0.0)
