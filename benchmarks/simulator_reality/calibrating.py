"""The step times that explain what was seen of loads."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from benchmarks.simulator_reality.loads import FIRST, OUTPUT, SHORT, Load
from benchmarks.simulator_reality.seeing import Seen
from benchmarks.simulator_reality.types import Facts
from profiler.compiled import Records, records
from profiler.step_time.records import (
    KIND_NUMBERS,
    MAX_ROWS,
    PREFILL_KNOTS,
    STEP_MODEL,
    VARIANT,
    rank_class,
)


def step_times(facts: Facts, seen: Sequence[Seen], context_s: float | None = None) -> tuple[Records, Records]:
    """[1], the step model, and [1 + variants], each one's part in a step. `context_s`: seconds of a cached
    token in a step, where it is known from elsewhere."""
    model = records(STEP_MODEL, 1)
    model.context_s = context_s_of(seen) if context_s is None else context_s
    model.decode_s = _decode(seen, model[0].context_s)
    model.prefill_grain = facts.batched_tokens / PREFILL_KNOTS
    model.prefill_s = _prefill(facts, [one for one in seen if one.load == Load(1, one.load.prompt, FIRST)])
    model.batched_tokens, model.kv_tokens = facts.batched_tokens, facts.kv_tokens
    model.max_rows, model.slots, model.path_s = facts.rows, facts.slots, facts.path_s
    return model, _variants(facts, seen, model)


def context_s_of(seen: Sequence[Seen]) -> float:
    """What long prompts add to a step, for each cached token."""
    short = _short(seen)
    long = long_of(seen)
    at_rows_s = np.interp(long.load.rows, [one.load.rows for one in short], [one.tpot_s for one in short])
    added_s = long.tpot_s - float(at_rows_s)
    return max(0.0, added_s / (long.load.rows * (long.load.prompt - SHORT)))


def long_of(seen: Sequence[Seen]) -> Seen:
    """The burst of long prompts."""
    return next(one for one in seen if one.load.prompt > SHORT and one.load.output == OUTPUT)


def _short(seen: Sequence[Seen]) -> list[Seen]:
    """Bursts of short prompts for the base, by rows."""
    chosen = [one for one in seen if one.load == Load(one.load.rows, SHORT, OUTPUT)]
    return sorted(chosen, key=lambda one: one.load.rows)


def _decode(seen: Sequence[Seen], context_s: float) -> npt.NDArray[np.float64]:
    """By rows without context, [MAX_ROWS + 1]."""
    short = _short(seen)
    rows = np.array([one.load.rows for one in short], dtype=np.float64)
    seconds: npt.NDArray[np.float64] = np.array([one.tpot_s for one in short])
    bare: npt.NDArray[np.float64] = seconds - context_s * rows * _context(SHORT)
    every = np.arange(MAX_ROWS + 1, dtype=np.float64)
    return np.maximum(_drawn(every, rows, np.maximum.accumulate(bare)), 1e-9)


def _context(prompt: int) -> float:
    """Tokens that a row has cached on average while it decodes."""
    return prompt + OUTPUT / 2


def _prefill(facts: Facts, seen: Sequence[Seen]) -> npt.NDArray[np.float64]:
    ordered = sorted(seen, key=lambda one: one.load.prompt)
    lengths = np.array([one.load.prompt for one in ordered], dtype=float)
    seconds = np.array([max(1e-9, one.ttft_s - facts.path_s) for one in ordered], dtype=np.float64)
    knots = np.arange(PREFILL_KNOTS + 1.0) * facts.batched_tokens / PREFILL_KNOTS
    return _drawn(knots, lengths, np.maximum.accumulate(seconds))


def _drawn(
    at: npt.NDArray[np.float64], known: npt.NDArray[np.float64], values: npt.NDArray[np.float64]
) -> npt.NDArray[np.float64]:
    """Between what is known, as its first before it, and drawn on along a line through all of it after it."""
    slope = max(0.0, float(np.polyfit(known, values, 1)[0])) if len(known) > 1 else 0.0
    return np.asarray(np.interp(at, known, values) + np.maximum(0.0, at - known[-1]) * slope)


def _variants(facts: Facts, seen: Sequence[Seen], model: Records) -> Records:
    """By kind: for each row, for each distinct variant and its bytes, and once for the kind; by least squares
    without negative parts. `model` gets the last."""
    made = records(VARIANT, 1 + len(facts.variants))
    made.kind, made.weight = -1, 1.0
    kinds = sorted({variant.kind for variant in facts.variants})
    mixed = [one for one in seen if one.load.output == OUTPUT and one.load.models != (0,)]
    parts = _parts(facts, mixed, kinds, model)
    for number, variant in enumerate(facts.variants, start=1):
        row_s, distinct_s, byte_s, launch_s = parts[kinds.index(variant.kind)]
        one = made[number]
        one.row_s, one.variant_s = row_s, distinct_s + byte_s * variant.size_bytes
        one.token_s = _token_s(seen, number, facts)
        one.bytes, one.rank, one.rank_class = variant.size_bytes, variant.rank, rank_class(variant.rank)
        one.kind = KIND_NUMBERS[variant.kind]
        model[0].launch_s[one.kind] = launch_s
    return made


def _parts(
    facts: Facts, seen: Sequence[Seen], kinds: Sequence[str], model: Records
) -> npt.NDArray[np.float64]:
    """[kinds, 4]: seconds of a row, of a distinct variant, of a byte of those, and of the kind."""
    from scipy.optimize import nnls

    matrix, added = [], []
    for one in seen:
        rows = [one.load.models[i % len(one.load.models)] for i in range(one.load.rows)]
        matrix.append([cell for kind in kinds for cell in _composition(facts, rows, kind)])
        context = one.load.rows * _context(one.load.prompt)
        base_s = model[0].decode_s[one.load.rows] + model[0].context_s * context
        added.append(max(0.0, one.tpot_s - base_s))
    if not matrix:
        return np.zeros((len(kinds), 4))
    scale = np.maximum(np.max(matrix, axis=0), 1.0)  # bytes beside counts
    found, _ = nnls(np.array(matrix) / scale, np.array(added))
    return np.asarray(found / scale).reshape(len(kinds), 4)


def _composition(facts: Facts, rows: Sequence[int], kind: str) -> list[float]:
    own = [n for n in rows if n and facts.variants[n - 1].kind == kind]
    size = sum(facts.variants[n - 1].size_bytes for n in set(own))
    return [float(len(own)), float(len(set(own))), float(size), float(bool(own))]


def _token_s(seen: Sequence[Seen], number: int, facts: Facts) -> float:
    """What each token of its prompts adds: seen of a variant of the same kind and rank."""
    variant = facts.variants[number - 1]
    for one in seen:
        if one.load.output != FIRST or one.load.models == (0,):
            continue
        measured = facts.variants[one.load.models[0] - 1]
        like = (measured.kind, measured.rank) == (variant.kind, variant.rank)
        if like and one.load.prompt == max(other.load.prompt for other in seen):
            base = next(b for b in seen if b.load == Load(1, one.load.prompt, FIRST))
            return max(0.0, one.ttft_s - base.ttft_s) / one.load.prompt
    return 0.0
