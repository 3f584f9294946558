"""Regular expressions for names of modules, matched in bounded time even if they are hostile.

PEFT's rank_pattern and alpha_pattern map regular expressions to numbers. On a hostile expression Python's
`re` may never end. Here an expression becomes an automaton whose states and steps are counted; an expression
that needs too many is refused. Matching is PEFT's: the expression matches an ending of the name that begins
at a dot.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from re import _constants as ops  # type: ignore[attr-defined]
from re import _parser  # type: ignore[attr-defined]
from typing import Any

MAX_LENGTH = 500  # characters of an expression
MAX_STATES = 2_000
MAX_STEPS = 200_000  # of states examined; remembered states cost nothing

Test = Callable[[str], bool]
_CATEGORIES: dict[Any, Test] = {
    ops.CATEGORY_DIGIT: str.isdecimal,
    ops.CATEGORY_NOT_DIGIT: lambda c: not c.isdecimal(),
    ops.CATEGORY_WORD: lambda c: c.isalnum() or c == "_",
    ops.CATEGORY_NOT_WORD: lambda c: not (c.isalnum() or c == "_"),
    ops.CATEGORY_SPACE: str.isspace,
    ops.CATEGORY_NOT_SPACE: lambda c: not c.isspace(),
}
_SAID = {
    ops.ASSERT: "looking ahead or back, (?=...)",
    ops.ASSERT_NOT: "looking ahead or back, (?!...)",
    ops.GROUPREF: "a group named again, \\1",
}
_BEGINNINGS = (ops.AT_BEGINNING, ops.AT_BEGINNING_STRING)
_ENDS = (ops.AT_END, ops.AT_END_STRING)


@dataclass(eq=False)
class _Place:
    """A position in an expression after some characters, and the known next positions by character."""

    states: frozenset[int]
    accepts: bool
    after: dict[str, _Place] = field(default_factory=dict)


class NamePattern:
    """One expression. Raises ValueError if it is invalid or uses an unsupported feature."""

    def __init__(self, expression: str) -> None:
        if len(expression) > MAX_LENGTH:
            raise ValueError(f"the pattern is longer than {MAX_LENGTH} characters")
        try:
            parsed = _parser.parse(rf"(.*\.)?({expression})$")
        except (re.error, RecursionError, OverflowError) as error:
            raise ValueError(str(error)) from error
        if parsed.state.flags & ~re.UNICODE:
            raise ValueError("flags such as (?i) are not supported")
        self._tests: list[tuple[Test, int] | None] = []
        self._free: list[list[tuple[Any, int]]] = []  # targets without a character, and where this is allowed
        self._steps = 0
        self._places: dict[frozenset[int], _Place] = {}
        start = self._state()
        self._accept = self._sequence(parsed, start)
        self._start = self._place(self._reached([start], ops.AT_BEGINNING))

    def matches(self, name: str) -> bool:
        """Whether the name matches. Raises ValueError when this takes too many steps."""
        place = self._start
        for character in name:
            place = place.after.get(character) or self._follow(place, character)
        return place.accepts

    def _follow(self, place: _Place, character: str) -> _Place:
        tests = (self._tests[state] for state in place.states)
        followers = [test[1] for test in tests if test is not None and test[0](character)]
        place.after[character] = self._place(self._reached(followers))
        return place.after[character]

    def _place(self, states: frozenset[int]) -> _Place:
        if states not in self._places:
            at_end = self._reached(states, ops.AT_END)
            self._places[states] = _Place(states, self._accept in at_end)
        return self._places[states]

    def _reached(self, states: Iterable[int], *places: Any) -> frozenset[int]:
        """These states, and those reachable without a character, at the beginning or the end of a name."""
        seen, left = set(states), list(states)
        while left:
            for place, state in self._free[left.pop()]:
                if state not in seen and (place is None or place in places):
                    seen.add(state)
                    left.append(state)
        self._steps += len(seen) + 1
        if self._steps > MAX_STEPS:
            raise ValueError("the pattern takes too many steps to match")
        return frozenset(seen)

    def _state(self) -> int:
        if len(self._tests) == MAX_STATES:
            raise ValueError("the pattern is too large")
        self._tests.append(None)
        self._free.append([])
        return len(self._tests) - 1

    def _join(self, start: int, end: int, place: Any = None) -> None:
        self._free[start].append((place, end))

    def _sequence(self, items: Any, start: int) -> int:
        """Add the states that match `items` in sequence after `start`; return the state after them."""
        for op, argument in items:
            start = self._item(op, argument, start)
        return start

    def _item(self, op: Any, argument: Any, start: int) -> int:
        if op in (ops.LITERAL, ops.NOT_LITERAL, ops.ANY, ops.IN):
            end = self._state()
            begin = self._state()
            self._join(start, begin)
            self._tests[begin] = (_test(op, argument), end)
            return end
        if op is ops.SUBPATTERN and not (argument[1] or argument[2]):
            return self._sequence(argument[3], start)
        if op is ops.BRANCH:
            return self._any_of(argument[1], start)
        if op in (ops.MAX_REPEAT, ops.MIN_REPEAT):
            return self._repeated(argument[0], argument[1], argument[2], start)
        if op is ops.AT and argument in (*_BEGINNINGS, *_ENDS):
            end = self._state()
            self._join(start, end, ops.AT_BEGINNING if argument in _BEGINNINGS else ops.AT_END)
            return end
        raise ValueError(f"{_SAID.get(op, str(op).lower())} is not supported")

    def _any_of(self, branches: Any, start: int) -> int:
        end = self._state()
        for branch in branches:
            begin = self._state()
            self._join(start, begin)
            self._join(self._sequence(branch, begin), end)
        return end

    def _repeated(self, least: int, most: int, items: Any, start: int) -> int:
        for _ in range(least):
            begin = self._state()
            self._join(start, begin)
            start = self._sequence(items, begin)
        if most is ops.MAXREPEAT:
            again, end = self._state(), self._state()
            self._join(start, again)
            self._join(self._sequence(items, again), again)
            self._join(again, end)
            return end
        end = self._state()
        for _ in range(most - least):
            begin = self._state()
            self._join(start, end)
            self._join(start, begin)
            start = self._sequence(items, begin)
        self._join(start, end)
        return end


def _test(op: Any, argument: Any) -> Test:
    """A test whether the item matches a character."""
    if op is ops.ANY:
        return lambda c: c != "\n"
    if op is not ops.IN:
        literal = chr(argument)
        return (lambda c: c == literal) if op is ops.LITERAL else (lambda c: c != literal)
    negated = bool(argument) and argument[0][0] is ops.NEGATE
    tests = tuple(_members(argument[1:] if negated else argument))
    return lambda c: any(test(c) for test in tests) is not negated


def _between(low: str, high: str, character: str) -> bool:
    return low <= character <= high


def _members(items: Any) -> Iterator[Test]:
    for op, argument in items:
        if op is ops.CATEGORY:
            yield _CATEGORIES[argument]
        elif op is ops.RANGE:
            yield partial(_between, *map(chr, argument))
        else:
            yield _test(op, argument)
