"""Which fetched folders give way, against a plain statement of the rule."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.fetching.eviction import Entry, Room, evictions
from workers.fetching.messages import FetchError

ENTRIES = st.lists(
    st.builds(
        lambda n, held, more, used, busy: Entry(str(n), held, held + more, used, busy),
        st.integers(0, 9), st.integers(0, 9), st.integers(0, 9), st.floats(0, 9), st.booleans(),
    ),
    unique_by=lambda entry: entry.name,
    max_size=6,
)  # fmt: skip


@given(ENTRIES, st.integers(0, 30), st.integers(0, 60), st.integers(0, 60))
def test_room_is_made_with_as_few_folders_as_the_order_allows(
    entries: list[Entry], need: int, budget: int, free: int
) -> None:
    idle = sorted((e for e in entries if not e.busy and e.held_bytes), key=lambda e: e.used_at_s)

    def fits(gone: int) -> bool:
        freed = sum(e.held_bytes for e in idle[:gone])
        claimed = sum(e.claimed_bytes for e in entries)
        pending = sum(e.claimed_bytes - e.held_bytes for e in entries)
        return (not budget or claimed - freed + need <= budget) and pending + need <= free + freed

    expected = next((count for count in range(len(idle) + 1) if fits(count)), None)
    if expected is None:
        with pytest.raises(FetchError) as failure:
            evictions(entries, need, Room(budget, free), margin_bytes=0)
        assert failure.value.code == "disk_budget_too_small"
    else:
        assert evictions(entries, need, Room(budget, free), margin_bytes=0) == [
            e.name for e in idle[:expected]
        ]
