"""The number of ways in which a grammar can read a text: repetitions of repetitions. Pure.

Before each step an engine finds the tokens that may follow for each grammar, in a time that grows with the
ways to read the text so far. `([a-z]{1,20} ?){1,20}` has thousands: a text splits into repetitions of
repetitions in all those ways. With a separator, `([a-z]{1,20},){1,20}`, there is one way. The limit comes
from measurements of xgrammar: grammars within it took at most 0.1 s of CPU per token, some others took
minutes.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

MOST_WAYS = 24
UNBOUNDED = 4  # for a repetition without an end: it is read by a loop, which is cheaper than a long count
_COUNTED = 32  # larger counts are no worse
DEEPEST = 64  # levels of nested groups
_PREFIX = re.compile(r"\?(?:P?<[^>]*>|<?[=!]|[a-zA-Z-]*:|>)")  # of a group: a name, a lookaround, flags
_RULE = re.compile(r"([A-Za-z_][A-Za-z0-9_-]*)\s*::=")


class TooManyWays(ValueError):
    """A repetition of repetitions. `ways` is a measure of it, above MOST_WAYS."""

    def __init__(self, ways: int) -> None:
        super().__init__(
            f"it has repetitions within repetitions that match in too many ways ({ways} > {MOST_WAYS})"
        )
        self.ways = ways


class TooDeep(ValueError):
    """Groups are nested more than DEEPEST levels deep."""


@dataclass(frozen=True, slots=True)
class _Part:
    """A part of an expression. `ways` is 0 if something fixed separates it from what comes before and after
    it; `is_empty`: it may match nothing."""

    ways: int
    is_empty: bool


_FIXED = _Part(0, False)
_NOTHING = _Part(0, True)


def check_regex(pattern: str) -> None:
    """Raises TooManyWays, TooDeep. Text that is not a regular expression may pass."""
    _Reader(pattern).alternatives(0)


def check_ebnf(grammar: str) -> None:
    """As `check_regex`, for a grammar of rules. Raises TooManyWays, TooDeep."""
    names = list(_RULE.finditer(grammar))
    ends = [*(name.start() for name in names), len(grammar)][1:]
    rules = _Rules({name[1]: grammar[name.end() : end] for name, end in zip(names, ends, strict=False)})
    for name in names:
        rules.part(name[1])


class _Rules:
    """The rules of a grammar as parts of other rules; a rule that leads to itself counts as fixed."""

    def __init__(self, bodies: dict[str, str]) -> None:
        self._bodies = bodies
        self._parts: dict[str, _Part] = {}
        self._depth = 0

    def part(self, name: str) -> _Part:
        if name not in self._parts and name in self._bodies:
            if self._depth >= DEEPEST:
                raise TooDeep(f"its rules refer to rules over more than {DEEPEST} levels")
            self._parts[name] = _FIXED
            self._depth += 1
            self._parts[name] = _Reader(self._bodies[name], self).alternatives(0)
            self._depth -= 1
        return self._parts.get(name, _FIXED)


class _Reader:
    """Reads the repetitions of an expression from left to right; with `rules`, a grammar's expression."""

    def __init__(self, text: str, rules: _Rules | None = None) -> None:
        self._text = text
        self._rules = rules
        self._is_regex = rules is None
        self._at = 0

    def alternatives(self, depth: int) -> _Part:
        if depth > DEEPEST:
            raise TooDeep(f"its groups are nested more than {DEEPEST} levels deep")
        found = [self._sequence(depth)]
        while self._peek() == "|":
            self._at += 1
            found.append(self._sequence(depth))
        return _Part(max(part.ways for part in found), any(part.is_empty for part in found))

    def _sequence(self, depth: int) -> _Part:
        """A sequence; it is loose if all its parts are, so that nothing in it is fixed."""
        ways, is_empty, is_loose = 0, True, True
        while (char := self._peek()) and char not in "|)":
            part = self._repeated(self._atom(depth))
            is_empty = is_empty and part.is_empty
            is_loose = is_loose and (part.ways > 0 or part.is_empty)
            ways += part.ways
        if self._peek() == ")" and not depth:  # no group is open
            self._at += 1
            return self._sequence(depth)
        return _Part(ways if is_loose else 0, is_empty)

    def _atom(self, depth: int) -> _Part:
        char = self._text[self._at]
        self._at += 1
        if char == "(":
            if self._is_regex and (prefix := _PREFIX.match(self._text, self._at)):
                self._at = prefix.end()
            part = self.alternatives(depth + 1)
            self._at += self._peek() == ")"
            return part
        if char == "[":
            self._class()
        elif char == "\\":
            self._at += 1
        elif not self._is_regex and char in "\"'":
            return self._literal(char)
        elif not self._is_regex and char.isspace():
            return _NOTHING
        elif not self._is_regex and (char.isalnum() or char == "_"):
            return self._name()
        elif self._is_regex and char in "^$":
            return _NOTHING
        return _FIXED

    def _class(self) -> None:
        if self._peek() == "^":
            self._at += 1
        if self._peek() == "]":
            self._at += 1
        while (char := self._peek()) and char != "]":
            self._at += 2 if char == "\\" else 1
        self._at += 1

    def _literal(self, quote: str) -> _Part:
        begin = self._at
        while (char := self._peek()) and char != quote:
            self._at += 2 if char == "\\" else 1
        is_empty = self._at == begin
        self._at += 1
        return _NOTHING if is_empty else _FIXED

    def _name(self) -> _Part:
        begin = self._at - 1
        while (char := self._peek()) and (char.isalnum() or char in "_-"):
            self._at += 1
        return self._rules.part(self._text[begin : self._at]) if self._rules else _FIXED

    def _repeated(self, part: _Part) -> _Part:
        """The part with the repetitions that follow it: `*`, `+`, `?`, `{2,5}`, one or several."""
        while (counts := self._counts()) is not None:
            least, most = counts
            if least == most == 1:
                continue
            loose = part.ways or part.is_empty
            if not loose:
                part = _Part(0 if least == most else 2, not least)
                continue
            times = 1 if most == 1 else UNBOUNDED if most is None else min(most, _COUNTED)
            ways = max(part.ways, 2) * times
            if ways > MOST_WAYS:
                raise TooManyWays(ways)
            part = _Part(ways, part.is_empty or not least)
        return part

    def _counts(self) -> tuple[int, int | None] | None:
        """(fewest, most) times; `most` None: unbounded. None: no repetition follows."""
        char = self._peek()
        if char and char in "*+?":
            self._at += 1
            if self._is_regex and self._peek() and self._peek() in "?+":  # lazy, or possessive
                self._at += 1
            return {"*": (0, None), "+": (1, None), "?": (0, 1)}[char]
        if char != "{":
            return None
        end = self._text.find("}", self._at)
        least, comma, most = self._text[self._at + 1 : max(end, 0)].partition(",")
        least, most = least.strip(), most.strip()
        if end < 0 or not (least or most) or any(n and not n.isdecimal() for n in (least, most)):
            return None
        self._at = end + 1
        fewest = int(least[:9] or 0)
        return fewest, (int(most[:9]) if most else None) if comma else fewest

    def _peek(self) -> str:
        return self._text[self._at] if self._at < len(self._text) else ""
