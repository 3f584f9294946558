"""The number of groups for a load: bounds, windows and the band, on random loads."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from controlplane.planning.autoscaling import (
    BAND,
    DOWN_S,
    UP_S,
    History,
    active,
    bounded,
    noted,
    resized,
    wanted,
)
from controlplane.state.records import Phase, Scaling
from controlplane.state.worker_groups import GroupPhase, WorkerGroup
from testkit.controlplane import builders

TARGET = 4.0
LOADS = st.lists(st.integers(0, 60), min_size=1, max_size=200)
BOUNDS = st.tuples(st.integers(0, 4), st.integers(1, 8)).map(lambda b: Scaling(min(b), max(b), None, 30.0))


def play(scaling: Scaling, loads: list[int], current: int) -> list[int]:
    """The number of groups after each second, with `load` requests under way in that second."""
    history, counts = None, []
    for second, load in enumerate(loads):
        history = noted(history, load, float(second), current)
        current = wanted(scaling, TARGET, current, history, float(second))
        counts.append(current)
    return counts


@given(scaling=BOUNDS, loads=LOADS, start=st.integers(0, 10))
def test_bounds_are_kept_and_none_is_only_for_the_idle(
    scaling: Scaling, loads: list[int], start: int
) -> None:
    counts = play(scaling, loads, start)
    for second, count in enumerate(counts):
        before = counts[second - 1] if second else start
        assert count <= scaling.max_groups
        if count == 0:
            assert scaling.min_groups == 0
            assert loads[second] == 0
            recent = loads[max(0, second - 29) : second + 1]
            assert before == 0 or (second >= 30 and not any(recent))
        else:
            assert count >= scaling.min_groups
        if loads[second]:  # what comes is never left without a group
            assert count >= 1


@given(scaling=BOUNDS, load=st.integers(0, 60), start=st.integers(0, 10))
def test_a_steady_load_gets_what_it_needs_and_nothing_changes_any_more(
    scaling: Scaling, load: int, start: int
) -> None:
    counts = play(scaling, [load] * 900, start)  # from ten to one takes ten times DOWN_S
    assert len(set(counts[-180:])) == 1
    final = counts[-1]
    if load == 0 and scaling.min_groups == 0:
        assert final == 0
        return
    low, high = math.ceil(load / TARGET), max(1, math.ceil(load / (TARGET * BAND)))
    assert all(a - b <= 1 for a, b in pairwise(counts[1:])), "more than one went at once"
    assert min(scaling.max_groups, max(scaling.min_groups, low)) <= final
    assert final <= max(scaling.min_groups, min(scaling.max_groups, high), 1)


@given(groups=st.integers(2, 8), data=st.data())
def test_in_the_band_nothing_moves(groups: int, data: st.DataObject) -> None:
    """A load that these groups carry, and that one fewer would not with room to spare."""
    least, most = math.floor(TARGET * BAND * (groups - 1)) + 1, int(TARGET * groups)
    loads = data.draw(st.lists(st.integers(least, most), min_size=100, max_size=200))
    assert set(play(Scaling(1, 8), loads, groups)) == {groups}


def test_peaks_and_gaps_shorter_than_the_windows_change_nothing() -> None:
    scaling = Scaling(1, 8)
    peaks = ([4] * 5 + [30] * int(UP_S - 1)) * 30
    assert set(play(scaling, peaks, 1)) == {1}
    gaps = ([0] * int(DOWN_S - 2) + [30]) * 5
    assert set(play(scaling, gaps, 8)) == {8}


def test_groups_follow_the_windows() -> None:
    scaling = Scaling(0, 4, None, 30.0)
    counts = play(scaling, [0] * 10 + [9] * 20 + [0] * 100, 0)
    assert counts[:10] == [0] * 10
    assert counts[10] == 3  # at once: no engine answers
    assert counts[10:30] == [3] * 20
    assert counts[58] == 3
    assert counts[59:] == [0] * 71  # 30 s after the last second with requests


def test_a_history_without_samples_keeps_the_number_of_groups() -> None:
    assert wanted(Scaling(1, 3), TARGET, 2, History(0.0, 0.0), 1.0) == 2


@given(target=st.floats(allow_nan=False), load=st.floats(0, 1e9))
def test_no_target_that_a_record_may_hold_raises(target: float, load: float) -> None:
    history = noted(noted(None, load, 0.0, 1), load, UP_S, 1)
    assert 1 <= wanted(Scaling(1, 3, target), target, 1, history, UP_S) <= 3


@given(scaling=BOUNDS, count=st.integers(0, 10))
def test_groups_stay_within_bounds(scaling: Scaling, count: int) -> None:
    found = bounded(scaling, count)
    assert scaling.min_groups <= found <= scaling.max_groups
    assert found == count or not scaling.min_groups <= count <= scaling.max_groups


@given(phases=st.lists(st.sampled_from(GroupPhase), max_size=6), count=st.integers(0, 8))
def test_resizing_keeps_those_that_serve(phases: list[GroupPhase], count: int) -> None:
    before = replace(
        builders.deployment("b", Phase.DEPLOYED),
        established=True,
        scaling=Scaling(0, 8),
        groups=tuple(WorkerGroup(n, phase) for n, phase in enumerate(phases)),
    )
    after = resized(before, count)
    assert active(after) == count
    numbers = [g.number for g in after.groups]
    assert len(numbers) == len(set(numbers))
    assert numbers[: len(phases)] == list(range(len(phases)))  # none is forgotten before it is stopped
    serving = [g.number for g in before.groups if g.phase is GroupPhase.SERVING]
    still = [g.number for g in after.groups if g.phase is GroupPhase.SERVING]
    assert still == serving[: len(still)]
    assert len(still) == min(len(serving), count)
    assert after.phase is Phase.DEPLOYED  # asleep or awake: requests are taken
