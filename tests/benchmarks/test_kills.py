"""What the benchmark of kills says of a silence: the longest time without a right answer."""

import pytest

from benchmarks.hardening.kills import silence_s


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
