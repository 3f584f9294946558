"""When a variant is merged in the base's place: never at more than three times what the best choice costs."""

from __future__ import annotations

import math
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from workers.variants.alone import BASE_UID, COST, COST_IN_PLACE_OF_ANOTHER, ROWS, Alone

PUT_BACK = COST - COST_IN_PLACE_OF_ANOTHER
SINGLE_STEP = 1 + 1 / ROWS
Steps = list[tuple[int, int]]  # the lone variant (BASE_UID: none), and rows
STEPS = st.lists(st.tuples(st.sampled_from([BASE_UID, 1, 2]), st.integers(1, 600)), max_size=40)


def cost(steps: Steps, held: list[int]) -> float:
    """The time that steps lose unmerged, and that changes of weights take; at the end the base is back."""
    lost = sum(1 + rows / ROWS for (uid, rows), has in zip(steps, held, strict=True) if uid and uid != has)
    changes = pairwise([BASE_UID, *held, BASE_UID])
    return lost + sum(_change(before, after) for before, after in changes)


def _change(before: int, after: int) -> float:
    if before == after:
        return 0.0
    return PUT_BACK if after == BASE_UID else COST - PUT_BACK


def best(steps: Steps) -> float:
    """The least cost, with all steps known before: by dynamic programming over who is held."""
    least = {BASE_UID: 0.0}
    for uid, rows in steps:
        lost = 1 + rows / ROWS if uid else 0.0
        least = {
            held: min(cost + _change(before, held) for before, cost in least.items()) + (held != uid) * lost
            for held in {BASE_UID, uid}
        }
    return min(cost + _change(held, BASE_UID) for held, cost in least.items())


@given(STEPS)
def test_the_rule_costs_at_most_three_times_the_best(steps: Steps) -> None:
    alone = Alone()
    held = [alone.step(uid, rows) for uid, rows in steps]
    assert all(has in (BASE_UID, uid) for (uid, _), has in zip(steps, held, strict=True))
    assert cost(steps, held) <= 3 * best(steps) + 1e-9


def test_a_running_variant_is_merged_once_it_has_lost_the_merge_s_cost() -> None:
    alone = Alone()
    held = [alone.step(5, 1) for _ in range(20)]
    first = held.index(5)
    assert first * SINGLE_STEP < COST <= (first + 1) * SINGLE_STEP
    assert set(held[first:]) == {5}


def test_a_long_prompt_is_merged_at_once() -> None:
    assert Alone().step(5, round(COST * ROWS)) == 5


def test_interruptions_restart_the_count() -> None:
    alone = Alone()
    for _ in range(30):
        assert [alone.step(5, 1), alone.step(5, 1), alone.step(BASE_UID, 2)] == [BASE_UID] * 3


def test_half_the_cost_is_enough_to_replace_another_merged_variant() -> None:
    rows = math.ceil((COST_IN_PLACE_OF_ANOTHER - 1) * ROWS)
    alone = Alone()
    assert alone.step(5, rows) == BASE_UID
    alone.step(6, 10_000)
    assert alone.step(5, rows) == 5
