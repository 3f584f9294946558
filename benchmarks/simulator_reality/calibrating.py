"""The step times that explain what was seen of loads."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from benchmarks.simulator_reality.loads import FIRST, LONGER, OUTPUT, SHORT, Load, context_loads
from benchmarks.simulator_reality.of_variants import variants_of
from benchmarks.simulator_reality.seeing import Seen
from benchmarks.simulator_reality.types import Facts
from profiler.compiled import Records, records
from profiler.step_time.records import MAX_ROWS, PREFILL_KNOTS, STEP_MODEL

Floats = npt.NDArray[np.float64]


def step_times(facts: Facts, seen: Sequence[Seen]) -> tuple[Records, Records]:
    """[1], the step model, and [1 + variants], each one's part in a step."""
    model = records(STEP_MODEL, 1)
    model.context_s = _context_s(facts, seen)
    model.path_s = _path_s(facts, seen, model[0].context_s)
    model.decode_s = _decode(seen, model[0].context_s)
    model.prefill_grain = facts.batched_tokens / PREFILL_KNOTS
    model.prefill_s = _prefill(facts, seen, model)
    model.batched_tokens, model.kv_tokens = facts.batched_tokens, facts.kv_tokens
    model.max_rows, model.slots, model.wide_from = facts.rows, facts.slots, facts.wide_from
    return model, variants_of(facts, seen, model)


def _context_s(facts: Facts, seen: Sequence[Seen]) -> float:
    """The time that long prompts add to a step, for each cached token."""
    by_load = {one.load: one for one in seen}
    short, long = (by_load[load] for load in context_loads(facts))
    return max(0.0, long.tpot_s - short.tpot_s) / (long.load.rows * (long.load.prompt - SHORT))


def _path_s(facts: Facts, seen: Sequence[Seen], context_s: float) -> float:
    """From the client to the engine and back: the time that a prompt by itself waits beyond its step. Rows
    that decode together with such a prompt show the step's time; without such rows, the known path counts."""
    beside = _among_rows(seen)
    if not beside:
        return facts.path_s
    tokens = [one.load.rows + length for length, one in beside.items()]
    step_s = np.interp(list(beside), tokens, [_bare_s(one, context_s) for one in beside.values()])
    alone = {one.load.prompt: one.ttft_s for one in _alone(seen)}
    waits = [alone[length] - float(s) for length, s in zip(beside, step_s, strict=True)]
    return max(0.0, statistics.median(waits))


def _alone(seen: Sequence[Seen]) -> list[Seen]:
    """Prompts of the base by themselves, shortest first."""
    chosen = [one for one in seen if one.load == Load(1, one.load.prompt, FIRST)]
    return sorted(chosen, key=lambda one: one.load.prompt)


def _among_rows(seen: Sequence[Seen]) -> dict[int, Seen]:
    """Prompts of the base in batches with rows of the base, by length, shortest first."""
    chosen = {one.load.beside[1]: one for one in seen if one.load.beside and one.load.models == (0,)}
    return dict(sorted(chosen.items()))


def _bare_s(beside: Seen, context_s: float) -> float:
    """A step that fills a prompt together with rows, without the time of their cached tokens."""
    return beside.step_s - context_s * beside.load.rows * (SHORT + LONGER / 2)


def _short(seen: Sequence[Seen]) -> list[Seen]:
    """Bursts of short prompts for the base, by rows."""
    chosen = [one for one in seen if one.load == Load(one.load.rows, SHORT, OUTPUT)]
    return sorted(chosen, key=lambda one: one.load.rows)


def _decode(seen: Sequence[Seen], context_s: float) -> Floats:
    """By rows without context, [MAX_ROWS + 1]."""
    short = _short(seen)
    rows = np.array([one.load.rows for one in short], dtype=np.float64)
    seconds: Floats = np.array([one.tpot_s for one in short])
    bare: Floats = seconds - context_s * rows * (SHORT + OUTPUT / 2)
    every = np.arange(MAX_ROWS + 1, dtype=np.float64)
    return np.maximum(_drawn(every, rows, np.maximum.accumulate(bare)), 1e-9)


def _prefill(facts: Facts, seen: Sequence[Seen], model: Records) -> Floats:
    """Times by tokens, of prompts and of the rows with them. No step takes longer than one with more
    tokens."""
    beside = _among_rows(seen)
    known = {one.load.prompt: one.ttft_s - model[0].path_s for one in _alone(seen)}
    known = {length: seconds for length, seconds in known.items() if length not in beside}
    for length, one in beside.items():
        known[length + one.load.rows] = _bare_s(one, model[0].context_s)
    lengths = sorted(known)
    seconds = np.minimum.accumulate([max(1e-9, known[length]) for length in lengths[::-1]])[::-1]
    knots = np.arange(PREFILL_KNOTS + 1.0) * facts.batched_tokens / PREFILL_KNOTS
    return _drawn(knots, np.array(lengths, dtype=np.float64), seconds)


def _drawn(at: Floats, known: Floats, values: Floats) -> Floats:
    """Between what is known, as its first before it, and drawn on along a line through all of it after it."""
    slope = max(0.0, float(np.polyfit(known, values, 1)[0])) if len(known) > 1 else 0.0
    return np.asarray(np.interp(at, known, values) + np.maximum(0.0, at - known[-1]) * slope)
