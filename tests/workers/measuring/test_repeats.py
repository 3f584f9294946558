"""The number of runs of a load: at least the minimum unless it takes too long, more while it is quick."""

from __future__ import annotations

import pytest

from workers.measuring.__main__ import is_repeated


def runs(each_s: float, repeats: int, limit_s: float) -> int:
    done = 1
    while is_repeated(done, repeats, done * each_s, limit_s):
        done += 1
    return done


@pytest.mark.parametrize(
    ("each_s", "repeats", "limit_s", "expected"),
    [
        pytest.param(0.1, 3, 12.0, 9, id="quick"),
        pytest.param(0.4, 3, 12.0, 4, id="quick for a while"),
        pytest.param(2.0, 3, 12.0, 3, id="slow"),
        pytest.param(7.0, 3, 12.0, 2, id="slower than its limit"),
        pytest.param(0.1, 1, 12.0, 1, id="once"),
        pytest.param(0.1, 3, 0.25, 3, id="a limit below what is quick"),
    ],
)
def test_a_load_is_repeated(each_s: float, repeats: int, limit_s: float, expected: int) -> None:
    assert runs(each_s, repeats, limit_s) == expected
