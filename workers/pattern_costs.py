"""The cost of a tokenizer.json's regular expressions: detects expressions whose time grows faster than their
text.

An engine runs them on every prompt, in a thread that cannot be stopped. Each expression runs on texts on
which such expressions are slow: its own characters and words, repeated, with another character at the end.
This finds expressions that are slow by mistake or by intent; it proves nothing about an expression that
passes.
"""

from __future__ import annotations

import itertools
import json
import re
import time
from collections.abc import Iterator
from typing import Any

from profiler.errors import CheckpointError

MAX_PATTERNS = 32  # known tokenizers have up to 6
MAX_PATTERN_CHARACTERS = 20_000  # long ones list a script's characters
SHORT, LONG = 2_048, 8_192  # characters of the two texts whose times are compared
GROWTH = 8.0  # of the time from one to the other: 4 is linear, 16 quadratic
FREE_S = 0.05  # on the longer text; a linear expression takes 1 to 6 ms
EVERY = "aA0 \n!'é中\u0301"  # letters, a digit, a space, a line end, signs, an accent, an ideograph
TAILS = ("", "\0", "!", " ", "a", "0")
MAX_OWN = 12  # characters, and as many words, of the expression itself
_WORD = re.compile(r"\\?[^\\()\[\]{}|?*+.^$]")


def check_patterns(document: Any) -> None:
    """Check the expressions of a parsed tokenizer.json. Raises CheckpointError for one that costs too
    much.
    """
    patterns = tuple(dict.fromkeys(_patterns(document)))
    if len(patterns) > MAX_PATTERNS:
        raise CheckpointError(
            f"tokenizer.json has {len(patterns)} regular expressions, but at most {MAX_PATTERNS} are allowed;"
            " save the tokenizer with fewer"
        )
    for pattern in patterns:
        check_pattern(pattern)


def check_pattern(pattern: str) -> None:
    """Check one expression. Raises CheckpointError.

    An expression may take all the CPU time of this process, so the process needs a limit.
    """
    if len(pattern) > MAX_PATTERN_CHARACTERS:
        raise _refused(pattern, f"the expression has more than {MAX_PATTERN_CHARACTERS} characters")
    run = _splitter(pattern)
    units = list(dict.fromkeys((*EVERY, *_own_characters(pattern), *_own_words(pattern))))
    pairs = ("".join(pair) for pair in itertools.permutations((*EVERY[:6], *_own_characters(pattern)), 2))
    for unit in (*units, *pairs):
        for tail in TAILS if unit in units else TAILS[:2]:
            _check_text(pattern, run, unit, tail)


def _check_text(pattern: str, run: Any, unit: str, tail: str) -> None:
    long = _seconds(pattern, run, unit, tail, LONG)
    if long < FREE_S:
        return
    short = _seconds(pattern, run, unit, tail, SHORT)
    # another process may have disturbed the first run
    again = min(long, _seconds(pattern, run, unit, tail, LONG))
    if again >= FREE_S and again > GROWTH * short:
        raise _refused(
            pattern,
            f"{LONG // SHORT} times as much of the text {unit!r} takes {again / max(short, 1e-6):.0f} times "
            "as long",
        )


def _seconds(pattern: str, run: Any, unit: str, tail: str, characters: int) -> float:
    """CPU time of this thread for one run."""
    text = unit * (characters // len(unit)) + tail
    begun = time.thread_time()
    try:
        run.pre_tokenize_str(text)
    except MemoryError:
        raise
    except BaseException as error:  # the library panics, which is no Exception
        if isinstance(error, KeyboardInterrupt | SystemExit):
            raise
        raise _refused(pattern, f"the expression fails on a repeated {unit!r}: {str(error)[:100]}") from None
    return time.thread_time() - begun


def _splitter(pattern: str) -> Any:
    from tokenizers import Regex, pre_tokenizers

    try:
        return pre_tokenizers.Split(Regex(pattern), "isolated")
    except Exception as error:
        raise _refused(pattern, f"the expression is invalid: {str(error)[:100]}") from error


def _patterns(document: Any) -> Iterator[str]:
    """All expressions in the document: normalizer, pre-tokenizer, decoder."""
    left = [document]
    while left:
        match left.pop():
            case {"Regex": str(pattern)}:
                yield pattern
            case dict() as found:
                left += [value for key, value in found.items() if key != "vocab"]
            case list() as found if not found or not isinstance(found[0], str):
                left += found


def _own_characters(pattern: str) -> list[str]:
    found = (c for c in pattern if c not in "()[]{}|?*+\\^$." and c not in EVERY)
    return list(dict.fromkeys(found))[:MAX_OWN]


def _own_words(pattern: str) -> list[str]:
    """Sequences of plain characters in the expression."""
    words, at = [], 0
    while at < len(pattern):
        run = []
        while (found := _WORD.match(pattern, at)) and not found[0][1:].isalpha():
            run.append(found[0][-1])
            at = found.end()
        if len(run) > 1:
            words.append("".join(run)[:64])
        at += 1
    return list(dict.fromkeys(words))[:MAX_OWN]


def _refused(pattern: str, why: str) -> CheckpointError:
    return CheckpointError(
        f"the regular expression {json.dumps(pattern[:120], ensure_ascii=False)} in tokenizer.json is too "
        f"slow or invalid: {why}; write it without repetitions within repetitions, or copy tokenizer.json of "
        "the model that this model was made from"
    )
