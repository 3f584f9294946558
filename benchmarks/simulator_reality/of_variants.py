"""The time that variants add to steps, from the figures of loads: by least squares without negative parts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from benchmarks.simulator_reality.loads import FIRST, LONGER, OUTPUT, SHORT, TILE_ROWS, Load
from benchmarks.simulator_reality.seeing import Seen
from benchmarks.simulator_reality.types import Facts
from profiler.compiled import Records, records
from profiler.step_time.records import KIND_NUMBERS, VARIANT, rank_class
from profiler.step_time.steps import is_wide, prefill_curve_s

Floats = npt.NDArray[np.float64]


def variants_of(facts: Facts, seen: Sequence[Seen], model: Records) -> Records:
    """[1 + variants], each one's part in a step. `model`, which has the base's, gets the parts of kinds."""
    made = records(VARIANT, 1 + len(facts.variants))
    made.kind, made.weight = -1, 1.0
    for row, variant in zip(made[1:], facts.variants, strict=True):
        row.kind, row.bytes = KIND_NUMBERS[variant.kind], variant.size_bytes
        row.rank, row.rank_class = variant.rank, rank_class(variant.rank)
    kinds = sorted({variant.kind for variant in facts.variants})
    _decoding(facts, seen, model, made, kinds)
    for kind in kinds:
        _prompts(facts, seen, model, made, kind)
    _wide(facts, seen, model, made, kinds)
    return made


def _decoding(
    facts: Facts, seen: Sequence[Seen], model: Records, made: Records, kinds: Sequence[str]
) -> None:
    """Times by kind: for each row, for each distinct variant and its bytes, and once for the kind."""
    matrix, added = [], []
    for one in seen:
        rows = _asked(one.load)
        decodes = one.load.output in (OUTPUT, LONGER) and one.load.beside is None
        if decodes and any(rows) and max(map(rows.count, filter(None, rows))) <= TILE_ROWS:
            matrix.append([cell for kind in kinds for cell in _composition(facts, rows, kind)])
            cached = one.load.rows * (one.load.prompt + one.load.output / 2)
            base_s = model[0].decode_s[one.load.rows] + model[0].context_s * cached
            added.append(max(0.0, one.tpot_s - base_s))
    parts = _solved(matrix, added, 4 * len(kinds)).reshape(len(kinds), 4)
    for row, variant in zip(made[1:], facts.variants, strict=True):
        row_s, distinct_s, byte_s, launch_s = parts[kinds.index(variant.kind)]
        row.row_s, row.variant_s = row_s, distinct_s + byte_s * variant.size_bytes
        model[0].launch_s[row.kind] = launch_s


def _composition(facts: Facts, rows: Sequence[int], kind: str) -> list[float]:
    """Rows of the kind, its distinct variants, their bytes, and whether there are any."""
    own = [n for n in rows if n and facts.variants[n - 1].kind == kind]
    size = sum(facts.variants[n - 1].size_bytes for n in set(own))
    return [float(len(own)), float(len(set(own))), float(size), float(bool(own))]


def _asked(load: Load) -> list[int]:
    """The model of each row."""
    return [load.models[i % len(load.models)] for i in range(load.rows)]


def _prompts(facts: Facts, seen: Sequence[Seen], model: Records, made: Records, kind: str) -> None:
    """The time of each token, in proportion to the rank or not. A prompt by itself bears once the time of a
    variant and its kind; together with rows of theirs it does not."""
    by_load = {one.load: one for one in seen}
    matrix, added = [], []
    for one in seen:
        prompt = _prompt_of(one.load)
        if prompt is None or prompt[0] == 0 or facts.variants[prompt[0] - 1].kind != kind:
            continue
        if is_wide(model[0], prompt[1] + (one.load.rows if one.load.beside else 0)):
            continue
        base, variant = by_load[_with_base(one.load)], facts.variants[prompt[0] - 1]
        alone = one.load.beside is None
        longer_s = one.ttft_s - base.ttft_s if alone else one.step_s - base.step_s
        once_s = made[prompt[0]].variant_s if alone else 0.0
        matrix.append([float(prompt[1]), float(prompt[1] * variant.rank), float(alone)])
        added.append(max(0.0, longer_s - once_s))
    token_s, rank_s, _ = _solved(matrix, added, 3)
    for row, variant in zip(made[1:], facts.variants, strict=True):
        if variant.kind == kind:
            row.token_s = token_s + rank_s * variant.rank


def _prompt_of(load: Load) -> tuple[int, int] | None:
    """Model and length of a prompt that is filled in a step in which no other is."""
    if load.beside is not None:
        return load.beside
    return (load.models[0], load.prompt) if (load.rows, load.output) == (1, FIRST) else None


def _with_base(load: Load) -> Load:
    """The same with the base's prompt."""
    if load.beside is None:
        return Load(1, load.prompt, FIRST)
    return Load(load.rows, load.prompt, load.output, load.models, (0, load.beside[1]))


def _wide(facts: Facts, seen: Sequence[Seen], model: Records, made: Records, kinds: Sequence[str]) -> None:
    """Parts in wide steps, by kind: for each distinct variant of rows and prompts, once for the kind, and for
    each token of prompts."""
    matrix, added = [], []
    for one in seen:
        prompt = _prompt_of(one.load)
        rows = _asked(one.load) if one.load.beside else []
        if prompt is None or not any((prompt[0], *rows)) or not is_wide(model[0], prompt[1] + len(rows)):
            continue
        cells = []
        for kind in kinds:
            own = {n for n in (prompt[0], *rows) if n and facts.variants[n - 1].kind == kind}
            cells += [float(len(own)), float(bool(own)), float(prompt[1] if prompt[0] in own else 0)]
        matrix.append(cells)
        known_s = prefill_curve_s(model[0], float(prompt[1] + len(rows)))
        known_s += model[0].context_s * len(rows) * (SHORT + LONGER / 2) + sum(made[n].row_s for n in rows)
        step_s = one.step_s if rows else one.ttft_s - model[0].path_s
        added.append(max(0.0, step_s - known_s))
    parts = _solved(matrix, added, 3 * len(kinds)).reshape(len(kinds), 3)
    for row, variant in zip(made[1:], facts.variants, strict=True):
        row.wide_variant_s, launch_s, row.wide_token_s = parts[kinds.index(variant.kind)]
        model[0].wide_launch_s[row.kind] = launch_s


def _solved(matrix: Sequence[Sequence[float]], added: Sequence[float], parts: int) -> Floats:
    """[parts]; zeros where nothing was seen."""
    from scipy.optimize import nnls

    if not matrix:
        return np.zeros(parts)
    scale = np.maximum(np.max(matrix, axis=0), 1.0)  # bytes and counts
    found, _ = nnls(np.array(matrix) / scale, np.array(added))
    return np.asarray(found / scale)
