"""PEFT's patterns for names of modules: the same names match, and none takes for ever."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from peft.utils.other import get_pattern_key

from profiler.variants import name_patterns
from profiler.variants.name_patterns import NamePattern

NAMES = [
    f"model.layers.{layer}.{module}"
    for layer in (0, 1, 2, 10, 31)
    for module in ("self_attn.q_proj", "self_attn.k_proj", "mlp.down_proj")
]
PATTERNS = [
    r".*\.layers\.1\..*(q_proj|k_proj|v_proj|o_proj)$",  # as axolotl writes them
    "^model.layers.1.self_attn.q_proj",
    "model.layers.1.self_attn.q_pro",
    "q_proj",
    r"layers\.(1|2)\.mlp\.\w+",
    "layers.[0-9]+.mlp.*",
    r"\d+.self_attn.q_proj",
    r"layers\.\d{2}\..*",
    "layers.1{1,2}?.+",
    "(?:[^.k]+)_proj",
    r"[^\d]+",
    "down_proj|q_proj",
    "q_proj$|^model",
    r"(\w+\.){3}\S+",
    ".*",
    "",
]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_the_same_names_as_with_peft(pattern: str) -> None:
    found = NamePattern(pattern)
    for name in NAMES:
        assert found.matches(name) == (get_pattern_key([pattern], name) == pattern), name


PARTS = st.sampled_from(["a", "b", ".", r"\.", "[ab]", "[^a]", r"\w", "^", "$", "(a|b.)", "(?:ab)"])
TIMES = st.sampled_from(["", "*", "+", "?", "{2}", "{0,2}", "*?"])
EXPRESSIONS = st.lists(st.tuples(PARTS, TIMES).map("".join), max_size=4).map("".join)


@given(expression=EXPRESSIONS, name=st.text("ab.", max_size=6))
def test_the_same_as_re_on_any_small_expression(expression: str, name: str) -> None:
    try:
        re.compile(expression)
    except re.error:
        return
    assert NamePattern(expression).matches(name) == bool(re.match(rf"(.*\.)?({expression})$", name))


@pytest.mark.parametrize(
    ("expression", "why"),
    [
        ("(", "missing"),
        ("(?!q)", "looking ahead"),
        ("(?P<x>a)(?P=x)", "a group named again"),
        ("(?i)Q_PROJ", "flags"),
        (r"\bq_proj", "at is not supported"),
        ("a" * 501, "longer than"),
        ("(((a{100}){100}){100})", "too large"),
        ("(?:){99999999}", "too large"),
        ("a{0,99999999}", "too large"),
    ],
)
def test_an_unmatchable_pattern_is_refused_at_once(expression: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        NamePattern(expression)


def test_an_expression_that_re_would_run_for_years() -> None:
    """Each of 40 letters doubles what `re` tries."""
    assert not NamePattern("(a|aa)+b").matches("a" * 400)


def test_steps_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(name_patterns, "MAX_STEPS", 60)
    found = NamePattern(".*a.*b.*")
    with pytest.raises(ValueError, match="too many steps"):
        found.matches("abcdefgh")
