"""The part of an answer that is compared with the right answer."""

from __future__ import annotations

import re
from enum import StrEnum


class Normalise(StrEnum):
    """`none`: the whole answer, unchanged; `space`: the whole answer, each run of white space as one space;
    `words`: its words in lower case, without punctuation; `first_line`: the first line that is not empty;
    `last_word`, `last_number`."""

    NONE = "none"
    SPACE = "space"
    WORDS = "words"
    FIRST_LINE = "first_line"
    LAST_WORD = "last_word"
    LAST_NUMBER = "last_number"


def normalised(text: str, how: Normalise) -> str:
    """The normalised part; empty if the text has no such part, which matches no answer that has one."""
    match how:
        case Normalise.NONE:
            return text
        case Normalise.SPACE:
            return " ".join(text.split())
        case Normalise.WORDS:
            return " ".join(_words(text))
        case Normalise.FIRST_LINE:
            return next((line for line in map(str.strip, text.splitlines()) if line), "")
        case Normalise.LAST_WORD:
            return next(reversed(_words(text)), "")
        case Normalise.LAST_NUMBER:
            return _last_number(text)


_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")
_NUMBER = re.compile(r"((?<![\w.])-)?(\d+)(?:\.(\d+))?")


def _last_number(text: str) -> str:
    """The last number without thousands' commas, leading zeros and trailing zeros: 1,024.50 is 1024.5."""
    numbers = _NUMBER.findall(_THOUSANDS.sub("", text))
    if not numbers:
        return ""
    sign, whole, fraction = numbers[-1]
    plain = ".".join(part for part in (whole.lstrip("0") or "0", fraction.rstrip("0")) if part)
    return plain if plain == "0" else sign + plain


def _words(text: str) -> list[str]:
    """The words in lower case; an apostrophe or a hyphen within a word is part of it."""
    return re.findall(r"\w+(?:['\u2019-]\w+)*", text.lower())
