"""The time of a step from its batch (`profiler.step_time.records` has the formula). Compiled."""

from __future__ import annotations

from profiler.compiled import Records, compiled
from profiler.step_time.records import BASE_KIND, CLASSES, KINDS, MAX_ROWS, PREFILL_KNOTS, RANK_CLASSES

_MOST_KNOTS = 1e9


@compiled
def add(batch: Records, variant: Records, context: float, is_first: bool) -> None:
    """Add a row with `context` cached tokens. `is_first`: the batch had no row of its variant."""
    batch.rows += 1
    batch.context += context
    if variant.kind != BASE_KIND:
        batch.rows_s += variant.row_s
        batch.by_kind[variant.kind] += 1
        batch.by_class[variant.rank_class] += 1
        if variant.rank:
            batch.ranked += 1
        if is_first:
            batch.variants_s += variant.variant_s
            batch.wide_variants_s += variant.wide_variant_s


@compiled
def remove(batch: Records, variant: Records, context: float, was_last: bool) -> None:
    """Remove a row. `was_last`: the batch has no other row of its variant."""
    batch.rows -= 1
    batch.context = max(0.0, batch.context - context)
    if variant.kind != BASE_KIND:
        batch.rows_s = max(0.0, batch.rows_s - variant.row_s)
        batch.by_kind[variant.kind] -= 1
        batch.by_class[variant.rank_class] -= 1
        if variant.rank:
            batch.ranked -= 1
        if was_last:
            batch.variants_s = max(0.0, batch.variants_s - variant.variant_s)
            batch.wide_variants_s = max(0.0, batch.wide_variants_s - variant.wide_variant_s)
    if batch.rows == 0:  # the remaining sums are rounding errors
        batch.context = batch.rows_s = batch.variants_s = batch.wide_variants_s = 0.0


@compiled
def largest_class(batch: Records) -> int:
    for number in range(CLASSES - 1, 0, -1):
        if batch.by_class[number] > 0:
            return number
    return 0


@compiled
def decode_curve_s(model: Records, rows: int) -> float:
    rows = max(0, rows)
    if rows <= MAX_ROWS:
        return model.decode_s[rows]  # type: ignore[no-any-return]
    each: float = model.decode_s[MAX_ROWS] - model.decode_s[MAX_ROWS - 1]
    return model.decode_s[MAX_ROWS] + each * (rows - MAX_ROWS)  # type: ignore[no-any-return]


@compiled
def prefill_curve_s(model: Records, tokens: float) -> float:
    """A step that fills `tokens` prompt tokens, whatever else it has. An invalid number of tokens counts as
    the most that a step takes."""
    at = tokens / model.prefill_grain
    if not 0.0 <= at < _MOST_KNOTS:
        at = float(PREFILL_KNOTS)
    knot = min(int(at), PREFILL_KNOTS - 1)
    low, high = model.prefill_s[knot], model.prefill_s[knot + 1]
    return low + (high - low) * (at - knot)  # type: ignore[no-any-return]


@compiled
def variants_s(model: Records, batch: Records) -> float:
    """The time that the batch's variants add to a step in which each row decodes."""
    seconds, present = batch.rows_s + batch.variants_s, False
    for kind in range(KINDS):
        if batch.by_kind[kind] > 0:
            seconds += model.launch_s[kind]
            present = True
    if present:
        seconds += model.any_s
    if model.padded_s > 0.0 and batch.ranked > 0:
        seconds += model.padded_s * batch.ranked * RANK_CLASSES[largest_class(batch)]
    return seconds  # type: ignore[no-any-return]


@compiled
def is_wide(model: Records, tokens: float) -> bool:
    """Whether a step with this many tokens, of prompts and rows together, is wide."""
    return 0 < model.wide_from <= tokens  # type: ignore[no-any-return]


@compiled
def wide_variants_s(model: Records, batch: Records) -> float:
    """The time that the batch's variants add to a wide step in which each row decodes."""
    seconds = batch.rows_s + batch.wide_variants_s
    for kind in range(KINDS):
        if batch.by_kind[kind] > 0:
            seconds += model.wide_launch_s[kind]
    return seconds  # type: ignore[no-any-return]


@compiled
def decode_step_s(model: Records, batch: Records) -> float:
    """A step in which every row decodes one token; 0 for an empty batch."""
    if batch.rows == 0:
        return 0.0
    own = decode_curve_s(model, batch.rows) + model.context_s * batch.context
    return own + variants_s(model, batch)  # type: ignore[no-any-return]


@compiled
def step_with_one_more_s(
    model: Records, batch: Records, variant: Records, context: float, is_first: bool
) -> float:
    """`decode_step_s` with one more row of `variant`. Changes nothing."""
    rows = batch.rows + 1
    seconds = decode_curve_s(model, rows) + model.context_s * (batch.context + context)
    seconds += batch.rows_s + batch.variants_s
    if variant.kind != BASE_KIND:
        seconds += variant.row_s
        if is_first:
            seconds += variant.variant_s
    present = False
    for kind in range(KINDS):
        if batch.by_kind[kind] > 0 or kind == variant.kind:
            seconds += model.launch_s[kind]
            present = True
    if present:
        seconds += model.any_s
    if model.padded_s > 0.0:
        ranked = batch.ranked + (1 if variant.rank else 0)
        if ranked > 0:
            largest = max(largest_class(batch), variant.rank_class)
            seconds += model.padded_s * ranked * RANK_CLASSES[largest]
    return seconds  # type: ignore[no-any-return]


@compiled
def mixed_step_s(model: Records, batch: Records, prompt_tokens: float, prompt_variants_s: float) -> float:
    """A step that fills `prompt_tokens` and decodes the rows of `batch`; the base is read once for both.
    `prompt_variants_s` is what the prompts' variants add."""
    tokens = prompt_tokens + batch.rows
    both = prefill_curve_s(model, tokens)
    alone = decode_curve_s(model, batch.rows) if batch.rows else 0.0
    variants = wide_variants_s(model, batch) if is_wide(model, tokens) else variants_s(model, batch)
    rest = model.context_s * batch.context + variants + prompt_variants_s
    return max(both, alone) + rest  # type: ignore[no-any-return]
