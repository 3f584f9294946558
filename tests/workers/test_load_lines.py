"""A worker's load as a line: there and back, and whatever else a connection may bring."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.load_lines import line_of, load_of
from workers.messages import WorkerLoad
from workers.tiers import Tier

COUNTS = st.integers(0, 2**53)
SECONDS = st.floats(0, 1e9)
VARIANTS = st.lists(st.tuples(COUNTS, st.sampled_from([str(tier) for tier in Tier])), max_size=5).map(tuple)
LOADS = st.builds(
    WorkerLoad, COUNTS, COUNTS, COUNTS, st.floats(0, 1), COUNTS, SECONDS, COUNTS, SECONDS, VARIANTS
)
LOAD = WorkerLoad(3, 2, 1, 0.5, 7, 0.02, 64, 0.1, ((7, "device"), (9, "host")))
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@given(LOADS)
def test_a_load_survives_writing_and_reading(load: WorkerLoad) -> None:
    line = line_of(load)
    assert line.endswith(b"\n")
    assert line.count(b"\n") == 1
    assert load_of(line) == load


def test_a_newer_workers_line_is_understood() -> None:
    assert load_of(json.dumps({**json.loads(line_of(LOAD)), "more": {"a": 1}}).encode()) == LOAD


@given(st.sampled_from(sorted(json.loads(line_of(LOAD)))), VALUES)
def test_one_field_with_anything_is_a_load_or_refused(name: str, value: object) -> None:
    line = json.dumps({**json.loads(line_of(LOAD)), name: value}).encode()
    try:
        found = load_of(line)
    except ValueError:
        return
    assert load_of(line_of(found)) == found


@given(st.binary(max_size=60) | VALUES.map(lambda value: json.dumps(value).encode()))
def test_other_lines_are_refused(line: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        load_of(line)
