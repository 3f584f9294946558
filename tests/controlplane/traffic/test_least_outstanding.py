"""Which worker takes a request without a policy."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.traffic.least_outstanding import least_outstanding

COUNTS = st.lists(st.integers(0, 9), min_size=1, max_size=8)
TIES = st.floats(0, 1, exclude_max=True)


@given(COUNTS, TIES)
def test_the_chosen_worker_has_the_fewest_requests(counts: list[int], tie: float) -> None:
    assert counts[least_outstanding(counts, tie)] == min(counts)


@pytest.mark.parametrize(("tie", "chosen"), [(0.0, 1), (0.49, 1), (0.5, 3), (0.99, 3)])
def test_equals_share_what_comes(tie: float, chosen: int) -> None:
    assert least_outstanding([2, 0, 1, 0], tie) == chosen


def test_no_worker_is_an_error() -> None:
    with pytest.raises(ValueError, match="empty"):
        least_outstanding([], 0.0)
