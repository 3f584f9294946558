"""Which requests a proxy refuses that cannot pass on all."""

from __future__ import annotations

import math
import random
from collections import Counter, deque
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.traffic.load_shedding import (
    CALM_S,
    LATE_ALONE_S,
    LATE_S,
    LEAST_PER_S,
    ROOM,
    LoadShedding,
    fair_level,
)

LOOK_S = 0.05


def late_for(
    shedding: LoadShedding,
    late_s: float,
    seconds: float,
    per_s: float,
    *,
    since_s: float = 0.0,
    beside_per_s: float = 2.0,
) -> float:
    """Every look is late while one tenant asks `per_s` times a second, and another tenant a little. Returns
    the time after it."""
    for number in range(round(seconds / LOOK_S)):
        now_s = since_s + number * LOOK_S
        for _ in range(round(per_s * LOOK_S)):
            if shedding.arrive("greedy", 1.0, now_s) is None:
                shedding.answer("greedy")
        if beside_per_s and number % round(1 / (beside_per_s * LOOK_S)) == 0:
            assert shedding.arrive("small", 1.0, now_s) is None
        shedding.look(late_s, now_s)
    return since_s + seconds


def test_a_gateway_that_is_in_time_refuses_no_request() -> None:
    shedding = LoadShedding()
    for number in range(10_000):
        assert shedding.arrive("greedy", 1.0, number / 1e4) is None
        if number % 500 == 0:
            shedding.look(LATE_S / 4, number / 1e4)
    assert shedding.budget_per_s == math.inf


def test_a_machine_that_stood_still_refuses_no_request() -> None:
    """All that came meanwhile is there at once, and one look is late."""
    shedding = LoadShedding()
    now_s = late_for(shedding, 0.001, 2.0, 200.0)
    for _ in range(3):
        now_s += 5.0
        assert all(shedding.arrive("greedy", 1.0, now_s) is None for _ in range(1000))
        shedding.look(5.0, now_s)
        now_s = late_for(shedding, 0.001, 1.0, 200.0, since_s=now_s)
    assert shedding.budget_per_s == math.inf


def test_a_gateway_that_other_work_delays_refuses_no_request() -> None:
    shedding = LoadShedding()
    late_for(shedding, 10 * LATE_S, 60.0, LEAST_PER_S / 2)
    assert shedding.budget_per_s == math.inf


def test_a_tenant_without_others_delays_only_itself() -> None:
    """The loop takes more work until the proxy is at risk."""
    shedding = LoadShedding()
    now_s = late_for(shedding, 0.9 * LATE_ALONE_S, 10.0, 400.0, beside_per_s=0.0)
    assert shedding.budget_per_s == math.inf
    now_s = late_for(shedding, 1.1 * LATE_ALONE_S, 10.0, 400.0, since_s=now_s, beside_per_s=0.0)
    assert shedding.budget_per_s < math.inf
    late_for(shedding, 0.9 * LATE_ALONE_S, 10.0, 400.0, since_s=now_s)
    assert shedding.budget_per_s == LEAST_PER_S


def test_the_time_to_retry_grows_with_the_excess_over_the_share() -> None:
    shedding = LoadShedding()
    now_s = late_for(shedding, 1.0, 30.0, 400.0)
    assert shedding.budget_per_s == LEAST_PER_S
    told = [shedding.arrive("greedy", 1.0, now_s) for _ in range(100)]
    assert told[-1] == pytest.approx(400.0 / (LEAST_PER_S - 2.0), rel=0.05)


def test_a_burst_refuses_no_request() -> None:
    """However late it makes the path, it is over within a second."""
    shedding = LoadShedding()
    now_s = 0.0
    for _ in range(20):
        now_s = late_for(shedding, 5.0, 0.8, 400.0, since_s=now_s)
        now_s = late_for(shedding, 0.0, 1.0, 2.0, since_s=now_s)
        assert shedding.budget_per_s == math.inf


def test_no_request_is_refused_when_the_load_has_fallen() -> None:
    shedding = LoadShedding()
    now_s = late_for(shedding, 1.0, 30.0, 400.0)
    assert shedding.budget_per_s < math.inf
    now_s = late_for(shedding, 0.0, 60.0, 20.0, since_s=now_s)
    assert shedding.budget_per_s == math.inf
    assert all(shedding.arrive("greedy", 1.0, now_s) is None for _ in range(1000))


def test_the_first_budget_is_a_part_of_what_was_answered() -> None:
    shedding = LoadShedding()
    for number in range(round(4.0 / LOOK_S)):
        now_s = number * LOOK_S
        for of_all in range(20):  # 400 a second, of which 240 are answered
            shedding.arrive("greedy", 1.0, now_s)
            if of_all < 12:
                shedding.answer("greedy")
        shedding.arrive("small", 1.0, now_s)
        shedding.look(0.001 if now_s < 2.5 else 1.0, now_s)
        if shedding.budget_per_s < math.inf:
            break
    assert shedding.budget_per_s == pytest.approx(0.6 * 240, rel=0.02)


def test_half_of_the_arrivals_count_before_the_first_answer() -> None:
    """Long answers that are not streamed are answered when they are finished."""
    shedding = LoadShedding()
    for number in range(round(4.0 / LOOK_S)):
        now_s = number * LOOK_S
        for name in ("greedy",) * 20 + ("small",):
            shedding.arrive(name, 1.0, now_s)
        shedding.look(0.001 if now_s < 2.5 else 1.0, now_s)
        if shedding.budget_per_s < math.inf:
            break
    assert shedding.budget_per_s == pytest.approx(0.6 * 0.5 * 420, rel=0.02)


def test_a_crowd_that_stays_may_not_become_late_again() -> None:
    """While the path has become faster and all requests pass for a while, none is refused. Before that has
    lasted for long, less than a second of waiting suffices to refuse some."""
    shedding = LoadShedding()
    now_s = late_for(shedding, 1.0, 10.0, 400.0)
    while shedding.budget_per_s < 400.0:
        now_s = late_for(shedding, 0.001, 0.5, 400.0, since_s=now_s)
    now_s = late_for(shedding, 0.001, 0.8 * CALM_S, 400.0, since_s=now_s)
    assert shedding.arrive("greedy", 1.0, now_s) is None
    assert 400.0 < shedding.budget_per_s <= 1.01 * ROOM * 402.0
    now_s = late_for(shedding, 0.8 * LATE_S, 1.5, 400.0, since_s=now_s)
    assert shedding.budget_per_s < 400.0
    while shedding.budget_per_s < 400.0:
        now_s = late_for(shedding, 0.001, 0.5, 400.0, since_s=now_s)
    late_for(shedding, 0.001, 1.2 * CALM_S, 400.0, since_s=now_s)
    assert shedding.budget_per_s == math.inf


@pytest.mark.parametrize("alone_s", [0.005, 0.05, 0.09, 0.12, 0.2])
@pytest.mark.parametrize("is_known", [True, False])
def test_a_slow_machine_refuses_no_request_after_its_overload(alone_s: float, is_known: bool) -> None:
    """However long the smallest request takes there without a crowd, and whether that was seen before."""
    choose, shedding, now_s = random.Random(2), LoadShedding(), 0.0

    def ask(seconds: float, late_s: float) -> float:
        for number in range(round(seconds / LOOK_S)):
            at_s = now_s + number * LOOK_S
            for name in ("greedy",) * 9 + ("small",):
                if shedding.arrive(name, 1.0, at_s) is None:
                    shedding.answer(name)
            shedding.look(late_s * choose.uniform(0.9, 1.1), at_s)
        return now_s + seconds

    if is_known:
        now_s = ask(5.0, alone_s)
    now_s = ask(3.0, 2.0)
    assert shedding.budget_per_s < math.inf
    now_s = ask(90.0, alone_s)
    assert shedding.budget_per_s == math.inf


amounts = st.floats(0.0, 1e4)
weights = st.floats(1e-3, 1e3)


@given(st.lists(st.tuples(amounts, weights), max_size=8), st.floats(1.0, 1e4))
def test_the_level_shares_the_budget_max_min_fairly(asked: list[tuple[float, float]], budget: float) -> None:
    level = fair_level(asked, budget)
    got = sum(min(amount, level * weight) for amount, weight in asked)
    wanted = sum(amount for amount, _ in asked)
    assert got == pytest.approx(min(budget, wanted), rel=1e-6)
    if wanted < budget:  # the rest is divided, and no more than the rest
        room = sum(weight for _, weight in asked) * (level - max((a / w for a, w in asked), default=0.0))
        assert room <= (budget - wanted) * (1 + 1e-6) + 1e-6 or not asked


@dataclass
class Loop:
    """An event loop on virtual time: each round reads all new requests, and continues begun work. For tenants
    in `may_per_s`, that many requests a second are served, and the rest is refused behind the proxy. `done`
    is by tenant."""

    pass_s: float
    refuse_s: float
    asks: dict[str, float]
    weights: dict[str, float]
    may_per_s: dict[str, float] = field(default_factory=dict)
    done: Counter[str] = field(default_factory=Counter)
    passed: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    waits_s: list[float] = field(default_factory=list)

    def run(self, seconds: float, settled_s: float) -> None:
        """Requests before `settled_s` are not counted."""
        choose = random.Random(1)
        comes: list[tuple[float, str]] = []
        for name, per_s in self.asks.items():
            at_s = choose.expovariate(per_s)
            while at_s < seconds:
                comes.append((at_s, name))
                at_s += choose.expovariate(per_s)
        left = deque(sorted(comes))
        shedding, now_s, due_s = LoadShedding(), 0.0, LOOK_S
        begun: list[str] = []
        taken: Counter[str] = Counter()
        while left or begun:
            if not begun and now_s < due_s:
                now_s = max(now_s, min(due_s, left[0][0] if left else due_s))
            if now_s >= due_s:
                shedding.look(now_s - due_s, now_s)
                due_s = now_s + LOOK_S
            ready = []
            while left and left[0][0] <= now_s:
                ready.append(left.popleft())
            for name in begun:
                now_s += self.pass_s / 2
                is_done = taken[name] < self.may_per_s.get(name, math.inf) * now_s
                taken[name] += is_done
                self.done[name] += is_done and now_s >= settled_s
                shedding.answer(name, not is_done)
            begun = []
            for at_s, name in ready:
                is_refused = shedding.arrive(name, self.weights[name], now_s) is not None
                now_s += self.refuse_s if is_refused else self.pass_s / 2
                if not is_refused:
                    begun.append(name)
                if at_s >= settled_s:
                    (self.refused if is_refused else self.passed)[name] += 1
                    self.waits_s.append(now_s - at_s)


@pytest.mark.parametrize(
    ("asks", "weights", "pass_s", "refuse_s"),
    [
        ({"small": 7.0, "greedy": 163.0}, {"small": 1.0, "greedy": 1.0}, 0.01, 0.0005),
        ({"small": 7.0, "greedy": 600.0}, {"small": 1.0, "greedy": 1.0}, 0.005, 0.0005),
        (
            {"small": 20.0, "greedy": 300.0, "heavy": 400.0},
            {"small": 1.0, "greedy": 1.0, "heavy": 2.0},
            0.005,
            0.0003,
        ),
        (
            {"small": 5.0, **{f"greedy {n}": 60.0 for n in range(9)}},
            {"small": 1.0, **{f"greedy {n}": 1.0 for n in range(9)}},
            0.005,
            0.0003,
        ),
    ],
)
def test_a_loop_with_more_than_it_can_do(
    asks: dict[str, float], weights: dict[str, float], pass_s: float, refuse_s: float
) -> None:
    """The gateway passes nearly its capacity, and shares it by weight. A tenant below its share loses a
    request at times, when many of its own come at once."""
    loop = Loop(pass_s, refuse_s, asks, weights)
    loop.run(seconds=120.0, settled_s=20.0)
    assert loop.refused["small"] <= 0.002 * loop.passed["small"]
    could_per_s = (1.0 - sum(asks.values()) * refuse_s) / (pass_s - refuse_s)
    assert 0.8 * could_per_s < loop.passed.total() / 100.0 <= 1.01 * could_per_s
    others = {name: loop.passed[name] / weights[name] for name in asks if name != "small"}
    assert max(others.values()) <= 1.05 * min(others.values())
    assert sorted(loop.waits_s)[len(loop.waits_s) // 2] < 1.5 * LATE_S


@pytest.mark.parametrize("factor", [10.0, 30.0])
def test_requests_that_are_refused_later_delay_no_other_request(factor: float) -> None:
    """Engines that can do 17 requests a second are kept busy by a path that could pass on 150."""
    asks = {"small": 0.4 * 17.0, "greedy": (factor - 0.4) * 17.0}
    loop = Loop(0.0065, 0.0003, asks, {"small": 1.0, "greedy": 1.0}, may_per_s={"greedy": 0.6 * 17.0})
    loop.run(seconds=120.0, settled_s=20.0)
    assert loop.done["greedy"] >= 0.97 * 0.6 * 17.0 * 100.0
    assert sorted(loop.waits_s)[len(loop.waits_s) * 99 // 100] < 0.05
    assert loop.refused["small"] <= 0.002 * loop.passed["small"]


@pytest.mark.parametrize(
    ("asks", "weights"),
    [
        ({"A": 50.0, "B1": 150.0, "B2": 150.0}, {"A": 1.0, "B1": 1.0, "B2": 1.0}),
        ({"A": 30.0, "B1": 300.0}, {"A": 1.0, "B1": 4.0}),
    ],
    ids=["of two others", "of a heavy one"],
)
def test_refusals_of_other_tenants_take_nothing_from_a_served_tenant(
    asks: dict[str, float], weights: dict[str, float]
) -> None:
    """A's engines do all that it asks for; of the others 97 of 100 are refused. A gets what it would get of
    a path that is as good for all: its share of what that can pass on, or all that it asks for."""
    may_per_s = {name: 0.03 * asks[name] for name in asks if name != "A"}
    loop = Loop(0.0065, 0.0003, asks, weights, may_per_s=may_per_s)
    loop.run(seconds=180.0, settled_s=30.0)
    could_per_s = (1.0 - sum(asks.values()) * 0.0003) / (0.0065 - 0.0003)
    share_per_s = min(asks["A"], could_per_s * weights["A"] / sum(weights.values()))
    assert loop.done["A"] / 150.0 >= 0.85 * share_per_s


def test_long_answers_that_are_not_there_yet_are_not_wasted() -> None:
    """A refused request is answered at once, a served one after a minute. 70 ms are not too long a path."""
    shedding = LoadShedding()
    for number in range(round(50.0 / LOOK_S)):
        now_s = number * LOOK_S
        for _ in range(3):
            assert shedding.arrive("batch", 1.0, now_s) is None
        if number % 4 == 0:
            assert shedding.arrive("other", 1.0, now_s) is None
            shedding.answer("other", is_refusal=True)
        shedding.look(0.07, now_s)
    assert shedding.budget_per_s == math.inf


def test_a_loop_that_stood_still_goes_on_refusing() -> None:
    """Requests of that time are read after it, so that for one window it looks as if next to nothing came."""
    shedding = LoadShedding()
    now_s = late_for(shedding, 1.0, 30.0, 400.0)
    assert shedding.budget_per_s < math.inf
    shedding.look(4.0, now_s + 4.0)
    shedding.look(4.0, now_s + 4.0)
    assert shedding.budget_per_s < math.inf


@pytest.mark.parametrize("stands_still_s", [0.3, 0.5, 0.8])
def test_gateways_that_pause_do_not_raise_their_budget(stands_still_s: float) -> None:
    """They answer no client meanwhile, not even with refusals; that says nothing about the requests that
    would be served."""
    shedding, choose = LoadShedding(), random.Random(4)
    still = range(round(60.0 / LOOK_S), round((60.0 + stands_still_s) / LOOK_S))
    asked = ("greedy",) * round(160 * LOOK_S) + ("small",) * round(20 * LOOK_S)
    kept: list[str] = []
    for number in range(round(70.0 / LOOK_S)):
        now_s = number * LOOK_S
        kept += [name for name in asked if shedding.arrive(name, 1.0, now_s) is None]
        late_s = 2.0 if now_s < 3.0 else 0.01
        if number in still:
            late_s = now_s - (still[0] - 1) * LOOK_S
        else:
            for name in kept:
                shedding.answer(name, is_refusal=name == "greedy" and choose.random() < 0.9)
            kept = []
        shedding.look(late_s, now_s)
        assert now_s < 10.0 or shedding.budget_per_s < 110.0


def test_a_new_tenant_finds_the_budget_at_the_path_s_capacity() -> None:
    """This also holds after a long time without tenants whose requests are served."""
    shedding, choose = LoadShedding(), random.Random(3)

    def ask(seconds: float, since_s: float, served_per_s: int) -> int:
        """The number of the served tenant's refused requests. The path carries 600 a second; another tenant's
        1,500 are refused behind it."""
        refused, passed = 0, 0
        for number in range(round(seconds / LOOK_S)):
            now_s = since_s + number * LOOK_S
            for _ in range(round(1500 * LOOK_S)):
                if shedding.arrive("greedy", 1.0, now_s) is None:
                    shedding.answer("greedy", is_refusal=choose.random() < 0.97)
                    passed += 1
            for _ in range(round(served_per_s * LOOK_S)):
                if shedding.arrive("served", 1.0, now_s) is None:
                    shedding.answer("served")
                else:
                    refused += 1
            per_s, passed = passed / LOOK_S, 0
            shedding.look(2.0 if per_s > 600.0 else 0.03, now_s)  # to refuse makes it slow as well
        return refused

    assert ask(60.0, 0.0, 20) < 0.01 * 60 * 20
    assert shedding.budget_per_s < math.inf
    assert ask(10.0, 60.0, 200) < 0.15 * 10 * 200
    assert ask(10.0, 70.0, 200) < 0.02 * 10 * 200
