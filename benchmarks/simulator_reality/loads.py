"""Loads of known composition, from which step times are told."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from benchmarks.simulator_reality.types import Asked, Facts

SHORT, OUTPUT = 16, 48  # tokens; answers of this length make their start negligible
LONGER = 96  # tokens of answers during which prompts come
TILE_ROWS = 16  # of one variant that kernels take at once; a line through more of them would be of no batch
MARGIN = 16  # tokens that the longest prompt leaves free
FIRST = 2  # tokens of an answer of which only the first matters
LENGTHS = 6  # of prompts
BESIDE_FROM = 2  # of those, ascending, the first that is filled together with rows


@dataclass(frozen=True)
class Load:
    """Each engine gets `rows` requests at once, which ask `models` in turn. `beside` is a model and a length:
    while the rows decode, such prompts come one after the other, each for one token."""

    rows: int
    prompt: int
    output: int
    models: tuple[int, ...] = (0,)
    beside: tuple[int, int] | None = None


def loads(facts: Facts) -> list[Load]:
    """The base by rows, by context and by prompt; each variant in one row and in a tile, and by prompt; all
    of them; and prompts with rows that decode. A load comes after the loads that it is computed from."""
    everyone = tuple(range(1, len(facts.variants) + 1))
    found = [*_of_base(facts), *_of_variants(facts)]
    if everyone:
        found += [Load(facts.rows, SHORT, OUTPUT, everyone), Load(facts.rows, SHORT, OUTPUT, (0, *everyone))]
        found.append(Load(min(len(everyone), facts.rows), SHORT, OUTPUT, everyone))
    return [*found, *_prompts_among_rows(facts, everyone)]


def _of_base(facts: Facts) -> list[Load]:
    by_rows = sorted({n for n in (1, 2, 4, 8, 16, 32, 64, 128) if n < facts.rows} | {facts.rows})
    return [
        *(Load(rows, SHORT, OUTPUT) for rows in by_rows),
        *context_loads(facts),
        *(Load(1, prompt, FIRST) for prompt in prompts(facts)),
    ]


def context_loads(facts: Facts) -> tuple[Load, Load]:
    """Loads with few tokens cached and with many. They have as many rows as arrivals, for attention reads the
    cache of few rows slowly; no answer ends before the last prompt is filled."""
    rows, long = max(1, facts.rows // 2), prompts(facts)[-2]
    return Load(rows, SHORT, LONGER), Load(rows, long, LONGER)


def _of_variants(facts: Facts) -> list[Load]:
    found = []
    for variant in one_of_each(facts):
        rows = min(facts.rows, TILE_ROWS)
        found += [Load(1, SHORT, OUTPUT, (variant,)), Load(rows, SHORT, OUTPUT, (variant,))]
        found += [Load(1, prompt, FIRST, (variant,)) for prompt in prompts(facts)]
    return found


def _prompts_among_rows(facts: Facts, everyone: tuple[int, ...]) -> list[Load]:
    """Prompts of the base and of each kind in batches with all models; prompts of the base in batches with
    the base, and with each kind."""
    rows, lengths = max(1, facts.rows // 2), prompts(facts)[BESIDE_FROM:]
    by_kind: dict[str, list[int]] = {}
    for number, variant in enumerate(facts.variants, start=1):
        by_kind.setdefault(variant.kind, []).append(number)
    asked: dict[tuple[int, ...], list[tuple[int, int]]] = {(0,): [(0, length) for length in lengths]}
    for numbers in by_kind.values():
        asked[tuple(numbers)] = [(0, lengths[len(lengths) // 2])]
    if everyone:
        firsts = [0, *(numbers[0] for numbers in by_kind.values())]
        asked[(0, *everyone)] = [(model, length) for model in firsts for length in lengths]
    found = []
    for models, besides in asked.items():
        found += [Load(rows, SHORT, LONGER, models)] if models != (0,) else []
        found += [Load(rows, SHORT, LONGER, models, beside) for beside in besides]
    return found


def prompts(facts: Facts) -> list[int]:
    """Their lengths, ascending."""
    return sorted({SHORT, *(int(n) for n in np.geomspace(SHORT, longest_prompt(facts), LENGTHS))})


def longest_prompt(facts: Facts) -> int:
    """The errors of a load: outside its answers, and in a step."""
    kv = facts.kv_tokens // facts.rows
    return max(SHORT + 1, min(facts.max_model_len, facts.batched_tokens, kv) - OUTPUT - MARGIN)


def one_of_each(facts: Facts) -> list[int]:
    """A variant of each kind and rank."""
    first: dict[tuple[str, int], int] = {}
    for number, variant in enumerate(facts.variants, start=1):
        first.setdefault((variant.kind, variant.rank), number)
    return list(first.values())


def burst(load: Load, groups: int) -> list[Asked]:
    """As many as all groups together take, sent at once. Neighbours go to different groups and are alike."""
    return [
        Asked(0.0, load.models[i // groups % len(load.models)], load.prompt, load.output)
        for i in range(load.rows * groups)
    ]
