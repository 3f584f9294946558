"""The engine on virtual time: against one that makes each step, and sums by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controlplane.simulation.run import run
from controlplane.simulation.world import DONE, World, room_for_ended
from testkit.simulation import worlds
from testkit.simulation.stepwise import Asked, Engine, Machine

VARIANTS = 3


def served(machine: Machine, requests: list[Asked], look_ahead: int = 0) -> World:
    world = worlds.new(machine, requests)
    run(world, worlds.rules(look_ahead=look_ahead), math.inf, room_for_ended(world))
    return world


@st.composite
def machines(draw: st.DrawFn) -> Machine:
    def numbers(least: float, most: float) -> tuple[float, ...]:
        one = st.just(0.0) | st.floats(least, most)
        return (0.0, *draw(st.lists(one, min_size=VARIANTS, max_size=VARIANTS)))

    return Machine(
        cached_s=draw(st.sampled_from([0.0, 1e-6, 1e-4])),
        launch_s=draw(st.sampled_from([0.0, 2e-3])),
        row_s=numbers(0, 2e-3),
        prompt_s=numbers(0, 1e-4),
        load_s=numbers(1e-3, 0.2),
        wide_from=draw(st.sampled_from([0, 1, 20, 60])),
        wide_launch_s=draw(st.sampled_from([0.0, 5e-3])),
        wide_variant_s=numbers(0, 5e-3),
        wide_prompt_s=numbers(0, 1e-4),
        budget=draw(st.sampled_from([8, 64, 500])),
        most_rows=draw(st.integers(1, 5)),
        kv_tokens=draw(st.sampled_from([90, 150, 1000])),
    )


REQUESTS = st.lists(
    st.builds(Asked, st.floats(0, 2), st.integers(1, 50), st.integers(1, 40), st.integers(0, VARIANTS)),
    min_size=1,
    max_size=12,
).map(sorted)


@settings(max_examples=2 * settings().max_examples, deadline=None)
@given(machines(), REQUESTS, st.integers(0, 2))
def test_jumps_amount_to_single_steps(machine: Machine, requests: list[Asked], look_ahead: int) -> None:
    expected = Engine(machine, look_ahead)
    expected.serve(requests)
    world = served(machine, requests, look_ahead)
    first_s = [outcome.first_s for outcome in expected.outcomes]
    end_s = [outcome.end_s for outcome in expected.outcomes]
    assert list(world.outcomes.first_s) == pytest.approx(first_s, rel=1e-9)
    assert list(world.outcomes.end_s) == pytest.approx(end_s, rel=1e-9)
    assert world.engines.preemptions[0] == expected.preemptions


@pytest.mark.parametrize("load_s", [(0.0, 0.0, 0.0, 0.0), (0.0, 0.3, 0.0, 0.0)])
def test_a_variant_that_takes_no_time_to_load_runs_at_once(load_s: tuple[float, ...]) -> None:
    """In an idle engine, and after one that takes time, as loads follow each other."""
    requests = [Asked(1.0, 10, 2, 1), Asked(1.0, 10, 2, 2), Asked(1.0, 10, 2, 3)]
    outcomes = served(Machine(load_s=load_s, row_s=(0.0,) * 4, prompt_s=(0.0,) * 4), requests).outcomes
    assert (outcomes.state == DONE).all()
    assert outcomes.first_s == pytest.approx([1.0 + load_s[1] + Machine().prefill_s(30)] * 3)


def test_the_reference_preempts_in_some_of_these() -> None:
    requests = [Asked(0.0, 30, 40) for _ in range(4)]
    engine = Engine(Machine(kv_tokens=150))
    engine.serve(requests)
    assert engine.preemptions > 0
    assert engine.most_cached <= 150
    assert served(Machine(kv_tokens=150), requests).engines.preemptions[0] == engine.preemptions


def test_one_request_alone_takes_the_sum_of_its_steps() -> None:
    machine = Machine(budget=64)
    outcome = served(machine, [Asked(1.0, 100, 5)], look_ahead=1).outcomes[0]
    first_s = 1.0 + machine.prefill_s(64) + machine.prefill_s(36)
    cached = [101, 102, 103, 104]
    assert outcome.first_s == pytest.approx(first_s)
    decoding_s = sum(machine.decode_s(1) + machine.cached_s * tokens for tokens in cached)
    assert outcome.end_s == pytest.approx(first_s + decoding_s)


# Prompts of 100 tokens fill in 100 ms and of 10 tokens in 10 ms, and each decoding row's step takes 1 ms.
BY_HAND = Machine(base_s=0.0, each_s=1e-3, token_s=1e-3, cached_s=0.0, budget=500, kv_tokens=10_000)


@pytest.mark.parametrize(("look_ahead", "steps_between"), [(0, 0), (1, 1), (2, 2)])
def test_a_request_that_arrives_in_a_prefill_begins_after_the_scheduled_steps(
    look_ahead: int, steps_between: int
) -> None:
    world = served(BY_HAND, [Asked(0.0, 100, 50), Asked(0.05, 10, 5)], look_ahead)
    first, second = world.outcomes
    assert first.first_s == pytest.approx(0.1)
    assert second.first_s == pytest.approx(0.1 + steps_between * 0.001 + 0.011)  # with the first one's row


def test_each_step_has_the_requests_that_came_before_the_last_step_began() -> None:
    """The second comes in step 1 and is filled in step 3, the third in 2 and 4, the fourth in 3 and 5."""
    requests = [Asked(0.0, 100, 50), Asked(0.05, 10, 50), Asked(0.1005, 20, 50), Asked(0.105, 30, 50)]
    world = served(BY_HAND, requests, look_ahead=1)
    ends_s = np.cumsum([0.1, 0.001, 0.010 + 0.001, 0.020 + 0.002, 0.030 + 0.003])
    assert list(world.outcomes.first_s) == pytest.approx(list(ends_s[[0, 2, 3, 4]]))


def test_nothing_is_scheduled_ahead_of_who_comes_in_an_engines_last_step() -> None:
    world = served(BY_HAND, [Asked(0.0, 100, 1), Asked(0.05, 10, 1)], look_ahead=1)
    assert list(world.outcomes.first_s) == pytest.approx([0.1, 0.11])


def test_two_requests_share_steps() -> None:
    machine = Machine(cached_s=0.0, budget=500)
    world = served(machine, [Asked(0.0, 20, 3), Asked(0.0, 30, 5)])
    short, long = world.outcomes
    both_s = machine.prefill_s(50)
    assert (short.first_s, long.first_s) == (pytest.approx(both_s), pytest.approx(both_s))
    assert short.end_s == pytest.approx(both_s + 2 * machine.decode_s(2))
    assert long.end_s == pytest.approx(both_s + 2 * machine.decode_s(2) + 2 * machine.decode_s(1))


def test_a_variant_is_loaded_before_its_request_begins() -> None:
    machine = Machine(row_s=(0.0, 1e-3), prompt_s=(0.0, 1e-4), load_s=(0.0, 0.5))
    outcome = served(machine, [Asked(0.0, 10, 1, 1)]).outcomes[0]
    assert outcome.first_s == pytest.approx(0.5 + machine.prefill_s(10) + 10 * 1e-4)


def test_a_request_that_waited_for_a_child_runs_once_the_child_steps_back() -> None:
    """One variant runs at a time. The third request skips the line behind the first, and steps back when that
    has ended. Then no request runs, and the second one's variant must be loaded."""
    machine = Machine(row_s=(0.0,) * 3, prompt_s=(0.0,) * 3, load_s=(0.0, 0.125, 0.125), kv_tokens=1000)
    requests = [Asked(1.0, 1, 36, 2), Asked(1.2, 1, 1, 1), Asked(1.2, 1, 60, 2)]
    world = worlds.new(machine, requests)
    run(world, worlds.rules(limit=1), math.inf, room_for_ended(world))
    first, second, third = world.outcomes
    assert (world.outcomes.state == DONE).all()
    assert third.first_s < first.end_s < second.first_s < third.end_s
    assert second.first_s == pytest.approx(first.end_s + 0.125 + machine.prefill_s(1))
    assert world.engines.preemptions[0] == 1


@settings(max_examples=60, deadline=None)
@given(machines(), REQUESTS, st.integers(1, 2), st.integers(1, 3), st.integers(0, 2))
def test_no_limit_is_ever_exceeded(
    machine: Machine, requests: list[Asked], slots: int, limit: int, look_ahead: int
) -> None:
    """Looked at between any two events."""
    world = worlds.new(machine, requests)
    for snapshot in (world.truth, world.seen):
        snapshot.models.slots = slots
    world.slots.variant[0, slots:], world.slots.busy[0, slots:] = 0, 1
    rules = worlds.rules(limit=limit, look_ahead=look_ahead)
    ended = room_for_ended(world)
    engine = world.engines[0]
    while min(next_arrival_s(world), world.next_s[0]) < math.inf:
        run(world, rules, min(next_arrival_s(world), world.next_s[0]), ended)
        cached = engine.batch.context + engine.reserved
        assert engine.running <= 1 or cached <= machine.kv_tokens
        assert engine.running <= machine.most_rows
        held = world.slots.variant[0]
        assert (held > 0).sum() <= slots
        running = {int(row.variant) for row in world.rows[0, : engine.running]} - {0}
        assert len(running) <= min(limit, slots)
        there = {int(world.occurring[0, place].variant) for place in running}
        assert there <= set(held[world.slots.ready_s[0] == -math.inf].tolist())
    assert (world.outcomes.state == DONE).all()
    assert np.isfinite(world.outcomes.end_s).all()


def next_arrival_s(world: World) -> float:
    coming = int(world.gateway.coming[0])
    return float(world.asked.arrival_s[coming]) if coming < len(world.asked) else math.inf


@pytest.mark.parametrize(("almost_done_tokens", "preempted"), [(8, 1), (1 << 30, 0)])
def test_a_request_that_skipped_the_line_steps_back_unless_it_may_continue(
    almost_done_tokens: int, preempted: int
) -> None:
    """One variant runs at a time: the third request joins the first, before the second, and outlives it."""
    requests = [Asked(0.0, 1, 20, 1), Asked(0.001, 1, 5, 2), Asked(0.002, 1, 200, 1)]
    parts = (0.0, 0.0, 0.0)
    world = worlds.new(Machine(row_s=parts, prompt_s=parts, load_s=(0.0, 1e-3, 1e-3)), requests)
    rules = worlds.rules(limit=1)._replace(almost_done_tokens=almost_done_tokens)
    run(world, rules, math.inf, room_for_ended(world))
    first, second, third = world.outcomes
    assert world.engines.preemptions[0] == preempted
    assert second.first_s > first.end_s
    assert (second.end_s < third.end_s) == bool(preempted)
