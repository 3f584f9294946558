"""Bodies that take long to read are refused before they are read."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane import errors
from controlplane.traffic.body_bounds import DEEPEST, NUMBERS_PER_PART, SMALL_BYTES, check_parts

PADDING = "x" * SMALL_BYTES
MOST = 1000


def counted(value: Any) -> tuple[int, int]:
    """(texts, lists and objects; commas), by walking through it."""
    if isinstance(value, str):
        return 1, 0
    if not isinstance(value, list | dict):
        return 0, 0
    inner = [*value, *value.values()] if isinstance(value, dict) else value
    found = [counted(each) for each in inner]
    return 1 + sum(parts for parts, _ in found), max(0, len(value) - 1) + sum(more for _, more in found)


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text() | st.text('"\\[{,:é\U0001f600', max_size=6),
    lambda inner: (
        st.lists(inner, max_size=5) | st.dictionaries(st.text('a"\\{', max_size=3), inner, max_size=5)
    ),
    max_leaves=30,
)


@given(values, st.booleans(), st.sampled_from(["utf-8", "utf-8-sig", "utf-16", "utf-16-be", "utf-32-le"]))
def test_parts_are_counted_as_a_reader_finds_them(value: Any, ascii_only: bool, encoding: str) -> None:
    raw = json.dumps([PADDING, value], ensure_ascii=ascii_only).encode(encoding, "replace")
    parts, _ = counted(json.loads(raw))
    check_parts(raw, parts)
    with pytest.raises(errors.InvalidRequest, match="at most"):
        check_parts(raw, parts - 1)


@pytest.mark.parametrize(
    "value",
    [
        {f"key{number}": 1 for number in range(MOST)},
        [{}] * (MOST + 1),
        [[]] * (MOST + 1),
        ["a"] * (MOST + 1),
        [{"role": "user", "content": ""}] * (MOST // 4),
        [1] * (MOST * NUMBERS_PER_PART + 1),
    ],
)
def test_more_than_a_request_may_have(value: Any) -> None:
    with pytest.raises(errors.InvalidRequest):
        check_parts(json.dumps([PADDING, value]).encode(), MOST)


@pytest.mark.parametrize(
    "value",
    [',{}[]:\\"' * 100_000, "\\" * 99_999, [1] * MOST * NUMBERS_PER_PART, ["a"] * (MOST - 3), "é" * 10**6],
)
def test_brackets_in_a_text_do_not_count(value: Any) -> None:
    for ascii_only in (True, False):
        check_parts(json.dumps([PADDING, value], ensure_ascii=ascii_only).encode(), MOST)


def test_the_depth_of_a_body_is_bounded() -> None:
    fine = "[" * (DEEPEST - 1) + "]" * (DEEPEST - 1)
    check_parts(f'["{PADDING}", {fine}]'.encode(), MOST)
    with pytest.raises(errors.InvalidRequest, match="levels deep"):
        check_parts(f'["{PADDING}", [{fine}]]'.encode(), MOST)


def test_a_small_body_is_not_counted() -> None:
    check_parts(b"[" * SMALL_BYTES, 1)
