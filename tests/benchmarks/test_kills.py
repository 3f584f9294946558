"""What the benchmark of kills says of a silence: the longest time without a right answer."""

import pytest

from benchmarks.hardening.kills import Kill, _gaps, _silences, silence_s


@pytest.mark.parametrize(
    ("answers_at_s", "expected_s"),
    [
        ([], 10.0),
        ([5.0, 25.0], 10.0),
        ([11.0, 12.0, 19.0], 7.0),
        ([10.5, 11.0, 12.0, 13.0], 7.0),
        ([14.0], 6.0),
        ([19.0, 12.0, 11.0], 7.0),
    ],
    ids=["none at all", "none within", "after some answers", "until the end", "one", "threads out of order"],
)
def test_a_silence_lies_between_two_answers_or_the_edges(
    answers_at_s: list[float], expected_s: float
) -> None:
    assert silence_s(answers_at_s, 10.0, 20.0) == expected_s


def test_a_silence_is_that_of_the_kill_before_it() -> None:
    """The engine's is from 12 to 15, and the raylet's, which was killed last, from 23 to the end."""
    killed = [Kill("engine", 10.0, 1.0), Kill("agent", 16.0, None), Kill("raylet", 20.0, 5.0)]
    answers_at_s = [10.5, 12.0, 15.0, 16.5, 18.0, 19.0, 21.0, 22.0, 23.0]
    silences = _silences(killed, answers_at_s, 30.0)
    assert [(one.kill.role, one.gap_s) for one in silences] == [
        *(("engine", 3.0), ("agent", 1.5), ("raylet", 7.0))
    ]
    told = {role: _gaps(silences, role) for role in ("engine", "agent", "raylet", "gcs")}
    assert {role: gaps["largest"] for role, gaps in told.items()} == {
        **{"engine": 3.0, "agent": 1.5, "raylet": 7.0, "gcs": None}
    }
    assert [told[role]["replaced_after_median"] for role in ("engine", "agent", "raylet")] == [1.0, None, 5.0]
