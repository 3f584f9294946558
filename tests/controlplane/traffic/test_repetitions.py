"""Grammars that take too long for each token are refused; those that people write pass.

Refused patterns took xgrammar more than 0.1 s of CPU for one token of a vocabulary of 49,152 pieces, or 8 s
and more in all; those that pass took less.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.traffic.grammar_bounds import MOST_OPTIONAL, check_grammar
from controlplane.traffic.repetitions import TooDeep, TooManyWays, check_ebnf, check_regex

SLOW = [
    *("([a-z]{0,50}){0,50}", "(([a-z]{0,5}){0,5}){0,5}", "(([a-z]{1,8}){1,8}){1,8}", "([a-z]{0,3}){0,500}"),
    *("([a-z]+){1,200}", "(([a-z]+)*)*x", "([a-z]?){100}", "([a-z]+ ?){1,20}", "([a-z]+ ?){1,100}"),
    *("(((a?){0,20}){0,20}){0,20}", "(([a-z ]{1,40}){1,40}){1,40}", "x|(?:(?:[a-z]*){0,40}|y)z"),
]
QUICK = [
    *("a{5000}", "([a-z]{1,10} ){1,50}", "([a-z ]{1,40},){1,40}", "([a-z]+ ){1,200}", "([a-z]{5}){100}"),
    *(
        ".{0,5000}",
        "(.*a){20}",
        "(a|b)*c.{30}",
        "([a-z]+)*",
        "([a-z]+ ?)+",
        r"^(\w+\s?)+$",
        "([a-z]{0,10}){0,10}",
    ),
    *(r"^[a-z0-9]+(?:-[a-z0-9]+)*$", r"[\w.+-]+@\w+(\.\w+)+", r"((\w+\s?)+[.!?]\s?)+", r"\(?\d{3}\)?-?\d{4}"),
    *("((((", "a**", "[]a]{2}", "[^]]+", "{", "a{", "a{x}", "a|", "", ")", "))a", "[", "\\"),
]


@pytest.mark.parametrize("pattern", SLOW)
def test_repetitions_of_repetitions_are_refused(pattern: str) -> None:
    with pytest.raises(TooManyWays):
        check_regex(pattern)
    grammars: tuple[Any, ...] = (
        {"regex": pattern},
        {"json": {"type": "string", "pattern": pattern}},
        {"json": json.dumps({"properties": {"a": {"items": [{"pattern": pattern}]}}})},
        {"json": {"patternProperties": {pattern: {}}}},
        {"structural_tag": json.dumps({"format": {"type": "regex", "pattern": pattern}})},
        {
            "type": "json_schema",
            "json_schema": {"name": "x", "schema": {"$defs": {"a": {"pattern": pattern}}}},
        },
        [{"function": {"name": "f", "parameters": {"properties": {"a": {"pattern": pattern}}}}}],
    )
    for grammar in grammars:
        with pytest.raises(TooManyWays):
            check_grammar(grammar)


@pytest.mark.parametrize("pattern", QUICK)
def test_common_patterns_pass(pattern: str) -> None:
    check_regex(pattern)
    check_grammar({"regex": pattern})


@pytest.mark.parametrize(
    "grammar",
    [
        'root ::= ("a"{0,100}){0,100}',
        'root ::= ([a-z]{0,30} " "?){0,30}',
        "root ::= b{0,30}\nb ::= c{0,30}\nc ::= [a-z]",
        "root ::= (\n  many\n){3,40}\nmany ::= [a-z]* | [0-9]*",
    ],
)
def test_rules_lead_to_rules(grammar: str) -> None:
    with pytest.raises(TooManyWays):
        check_ebnf(grammar)
    with pytest.raises(TooManyWays):
        check_grammar({"grammar": grammar})


@pytest.mark.parametrize(
    "grammar",
    [
        'root ::= root "a" | "b"',
        'root ::= "{" ws (item ("," ws item)*)? "}"\nitem ::= [a-z]+\nws ::= [ \\t\\n]*',
        'root ::= line{1,100}\nline ::= word " " word ";"\nword ::= [a-z]{1,20}',
        'root ::= (word "," word)*\nword ::= part{1,9}\npart ::= "a" | "\\"{9}"',
    ],
)
def test_rules_with_separators_pass(grammar: str) -> None:
    check_ebnf(grammar)


def test_depth_is_bounded() -> None:
    with pytest.raises(TooDeep):
        check_regex("(" * 5_000 + "a" + ")" * 5_000)
    with pytest.raises(TooDeep):
        check_ebnf("\n".join(f"r{number} ::= r{number + 1}" for number in range(5_000)))


def test_properties_that_may_be_left_out_are_bounded() -> None:
    many: dict[str, Any] = {"properties": {f"p{number}": {} for number in range(MOST_OPTIONAL + 1)}}
    with pytest.raises(ValueError, match="optional"):
        check_grammar({"json": many})
    check_grammar({"json": {**many, "required": ["p0"]}})


@given(st.text('([{}])|*+?,\\"a1 ^-:=\n', max_size=40))
def test_every_pattern_is_read_to_its_end(text: str) -> None:
    for check in (check_regex, check_ebnf):
        try:
            check(text)
            check("root ::=" + text)
        except (TooManyWays, TooDeep):
            pass
