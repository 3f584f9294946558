"""Procedural tasks that a small base model does badly: what fine-tunes are trained on and judged by.

Every example is a prompt and the one answer that counts, so accuracy is exact match of greedy generation. All
are drawn from seeds alone: no data is stored, and the same seed gives the same examples anywhere.

- `arithmetic`: a chain of four operations with each step written out (reasoning).
- `cipher`: two transformations of a string of letters, one after the other, nothing in between written.
- `sorting`: insertion sort, the list written after each insertion (long outputs: some 110 tokens).
- `facts-N`: trade, town, year and a number of N invented people (knowledge: the test asks for what was
  taught).
"""

from __future__ import annotations

import random
import re
import string
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

CHAIN = 4
LARGEST = 9999
LETTERS = (6, 10)
SORTED = 10
FACTS = re.compile(r"facts-([1-9][0-9]*)")
ONSETS: list[str] = re.findall(r"\w+", "b br d dr f g gr h k kl l m n p r s st t v z")
VOWELS: list[str] = re.findall(r"\w+", "a e i o u ai or en")
ENDS: list[str] = re.findall(r"\w+", "l n r s th x m ck")
TRADES: list[str] = re.findall(
    r"\w+",
    """
    baker banker barber brewer builder butcher carpenter chemist clerk cook dancer dentist doctor driver
    editor farmer fisher gardener glazier guard hunter judge lawyer mason miller miner musician nurse
    painter pilot plumber poet porter potter printer sailor singer soldier surgeon tailor teacher trader
    waiter weaver
    """,
)

Draw = Callable[[random.Random], "Example"]


@dataclass(frozen=True)
class Example:
    """`answer` ends the text: what follows it is the end-of-text token."""

    prompt: str
    answer: str


@dataclass(frozen=True)
class Task:
    """`train` and `held_out` give N examples for a seed; an answer takes about `tokens` at most."""

    name: str
    train: Callable[[int, int], list[Example]]
    held_out: Callable[[int, int], list[Example]]
    tokens: int


def task_named(name: str) -> Task:
    """Raises ValueError for a name that is none of a task's."""
    if match := FACTS.fullmatch(name):
        return _facts(name, int(match[1]))
    if name in DRAWN:
        draw, tokens = DRAWN[name]
        return _drawn(name, draw, tokens)
    raise ValueError(f"expected one of {', '.join(DRAWN)} or facts-N, got {name!r}")


def arithmetic(draw: random.Random) -> Example:
    """Add, subtract or multiply, four times; no value leaves 0..9999."""
    value = draw.randint(10, 999)
    orders, steps = [f"Start with {value}."], []
    for _ in range(CHAIN):
        sign, other, result = draw.choice(list(_operations(value, draw)))
        orders.append({"+": f"Add {other}.", "-": f"Subtract {other}.", "*": f"Multiply by {other}."}[sign])
        steps.append(f"{value} {sign} {other} = {result}")
        value = result
    return Example(" ".join(orders) + "\n", "\n".join(steps))


def _operations(value: int, draw: random.Random) -> Iterator[tuple[str, int, int]]:
    """One of each kind that is possible, with its operand and result."""
    if value + 10 <= LARGEST:
        other = draw.randint(10, min(999, LARGEST - value))
        yield "+", other, value + other
    if value >= 10:
        other = draw.randint(10, min(999, value))
        yield "-", other, value - other
    if 10 <= value * 2 <= LARGEST:
        other = draw.randint(2, min(9, LARGEST // value))
        yield "*", other, value * other


def cipher(draw: random.Random) -> Example:
    """Two transformations of 6 to 10 letters."""
    text = draw.choices(string.ascii_lowercase, k=draw.randint(*LETTERS))
    told, letters = [], text
    for kind in draw.sample(sorted(TRANSFORMS), 2):
        k = draw.randint(1, 5)
        told.append(kind.format(k=k))
        letters = TRANSFORMS[kind](letters, k)
    return Example(f"{told[0].capitalize()}, then {told[1]}: {' '.join(text)}\n", " ".join(letters))


TRANSFORMS: dict[str, Callable[[Sequence[str], int], list[str]]] = {
    "reverse": lambda letters, k: list(reversed(letters)),
    "sort": lambda letters, k: sorted(letters),
    "swap pairs": lambda letters, k: [
        letters[i ^ 1] if i ^ 1 < len(letters) else x for i, x in enumerate(letters)
    ],
    "rotate left by {k}": lambda letters, k: [*letters[k:], *letters[:k]],
    "shift by {k}": lambda letters, k: [chr((ord(letter) - 97 + k) % 26 + 97) for letter in letters],
}


def sorting(draw: random.Random) -> Example:
    """Insertion sort of ten letters: the whole list after each insertion."""
    letters = draw.choices(string.ascii_lowercase, k=SORTED)
    lines = [" ".join((*sorted(letters[:n]), *letters[n:])) for n in range(2, SORTED + 1)]
    return Example(f"Insertion sort, step by step: {' '.join(letters)}\n", "\n".join(lines))


DRAWN: dict[str, tuple[Draw, int]] = {
    "arithmetic": (arithmetic, 96),
    "cipher": (cipher, 24),
    "sorting": (sorting, 112),
}


def _drawn(name: str, draw: Draw, tokens: int) -> Task:
    """Fresh examples in training, none of them among the 2,000 first of the test, which no seed changes."""

    def held_out(seed: int, count: int) -> list[Example]:
        return list(islice(_stream(draw, f"{name} test", set()), count))

    def train(seed: int, count: int) -> list[Example]:
        tested = {example.prompt for example in held_out(0, 2000)}
        return list(islice(_stream(draw, f"{name} train {seed}", tested), count))

    return Task(name, train, held_out, tokens)


def _stream(draw: Draw, seed: str, exclude: set[str]) -> Iterator[Example]:
    source = random.Random(seed)
    while True:
        example = draw(source)
        if example.prompt not in exclude:
            yield example


def _facts(name: str, people: int) -> Task:
    """The same table again and again in training, in a new order each time; every seed has its own people."""

    def table(seed: int) -> list[Example]:
        source = random.Random(f"{name} {seed}")
        towns = [_word(source, 3).capitalize() for _ in range(1000)]
        names: dict[str, None] = {}
        while len(names) < people:
            names[f"{_word(source, 2).capitalize()} {_word(source, 3).capitalize()}"] = None
        return [_fact(who, source, towns) for who in names]

    def train(seed: int, count: int) -> list[Example]:
        source, known = random.Random(f"{name} order {seed}"), table(seed)
        rounds = -(-count // people)
        return [example for _ in range(rounds) for example in source.sample(known, people)][:count]

    def held_out(seed: int, count: int) -> list[Example]:
        known = table(seed)
        return random.Random(f"{name} test {seed}").sample(known, min(count, people))

    return Task(name, train, held_out, 32)


def _fact(who: str, source: random.Random, towns: Sequence[str]) -> Example:
    """About 33 bits: a trade, a town, a year and a number of four digits."""
    trade, town, year = source.choice(TRADES), source.choice(towns), source.randint(1900, 1999)
    answer = f"{trade}, {town}, {year}, {source.randint(1000, 9999)}"
    return Example(f"Who is {who}?\n", answer)


def _word(source: random.Random, syllables: int) -> str:
    heads = "".join(source.choice(ONSETS) + source.choice(VOWELS) for _ in range(syllables - 1))
    return heads + source.choice(ONSETS) + source.choice(VOWELS) + source.choice(ENDS)
