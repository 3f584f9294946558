"""A plan's step model and its variants' parts, sampled from predictions (`profiler.predicting`).

The predictor takes about a millisecond for a load, but a router asks a million times a second. So the
predictor is asked once for each of some loads, and the router interpolates between them.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from profiler.compiled import Records, records
from profiler.predicting.predict import predict
from profiler.predicting.types import Ground
from profiler.step_time.records import (
    KIND_NUMBERS,
    MAX_ROWS,
    PREFILL_KNOTS,
    STEP_MODEL,
    VARIANT,
    rank_class,
)
from profiler.types import Plan, Workload
from profiler.variants.types import VariantSpec

ROWS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
SHORT, LONG = 16, 512  # prompt tokens; a decoding row of a load has its prompt and half its output cached
OUTPUT = 2
PROMPTS = 33  # lengths, up to the most that a step takes
# The length of the prompts that show what a variant adds for each prompt token.
PROMPT_TOKENS = 1024


def step_model(ground: Ground, plan: Plan, max_rows: int, slots: int) -> Records:
    """[1], the step model of `plan`, with at most `max_rows` requests at once. Raises PlanError."""
    model = records(STEP_MODEL, 1)
    model.decode_s, model.context_s = _decode(ground, plan)
    model.prefill_s = _prefill(ground, plan)
    model.prefill_grain = plan.batched_tokens / PREFILL_KNOTS
    model.batched_tokens, model.kv_tokens = plan.batched_tokens, plan.kv_cache_tokens
    model.max_rows, model.slots = max_rows, slots
    whole = predict(ground, plan, Workload(1, SHORT, OUTPUT))
    model.path_s = whole.path_s.value if whole.path_s else 0.0
    return model


def add_variants(
    model: Records, ground: Ground, plan: Plan, variants: Sequence[VariantSpec], load_bytes_per_s: float
) -> Records:
    """[1 + variants], each variant's part in a step; the first entry is the base. The launch time of each
    kind is added to `model`. `load_bytes_per_s`: from the host's memory to the devices. Raises PlanError."""
    parts = [sampled_part(ground, plan, variant) for variant in variants]
    return with_parts(model, ground, variants, parts, load_bytes_per_s)


def with_parts(
    model: Records,
    ground: Ground,
    variants: Sequence[VariantSpec],
    parts: Sequence[Added],
    load_bytes_per_s: float,
) -> Records:
    """As `add_variants`, for variants whose parts were sampled before."""
    made = records(VARIANT, 1 + len(variants))
    made.kind, made.weight = -1, 1.0
    launches: dict[str, float] = {}
    for row, (variant, added) in enumerate(zip(variants, parts, strict=True), start=1):
        launches[variant.kind] = max(launches.get(variant.kind, 0.0), added.launch_s)
        one = made[row]
        one.row_s, one.variant_s, one.token_s = added.row_s, added.variant_s, added.token_s
        one.bytes, one.load_s = variant.weight_bytes, variant.weight_bytes / load_bytes_per_s
        one.rank, one.rank_class = variant.max_rank, rank_class(variant.max_rank)
        one.kind = KIND_NUMBERS[variant.kind]
    # Kernels of these kinds run for any variants, so every kind's measured launch time includes theirs.
    always = [seconds for kind, seconds in launches.items() if kind in ground.launched]
    model[0].any_s = min(always, default=0.0)
    for kind, seconds in launches.items():
        beside = 0.0 if kind in ground.launched else seconds - (model[0].any_s if always else 0.0)
        model[0].launch_s[KIND_NUMBERS[kind]] = max(0.0, beside)
    return made


@dataclasses.dataclass(frozen=True)
class Added:
    """Seconds that a variant adds: to a step for each row, once for the variant, once for its kind; and for
    each token of a prompt."""

    row_s: float
    variant_s: float
    launch_s: float
    token_s: float


def sampled_part(ground: Ground, plan: Plan, variant: VariantSpec) -> Added:
    """A variant's part, from loads of one row, two rows of one variant, and two rows of two equal
    variants."""
    if ground.calibration is None:
        return _read(ground, plan, variant)
    alike = dataclasses.replace(variant)
    one = _step_s(ground, plan, 1, SHORT, (variant,)) - _step_s(ground, plan, 1, SHORT)
    base_s = _step_s(ground, plan, 2, SHORT)
    same = _step_s(ground, plan, 2, SHORT, (variant, variant)) - base_s
    apart = _step_s(ground, plan, 2, SHORT, (variant, alike)) - base_s
    row_s, variant_s = max(0.0, same - one), max(0.0, apart - same)
    tokens = _up_to(ground, PROMPT_TOKENS)
    longer_s = _ttft_s(ground, plan, tokens, (variant,)) - _ttft_s(ground, plan, tokens)
    return Added(row_s, variant_s, max(0.0, one - row_s - variant_s), max(0.0, longer_s) / tokens)


def _read(ground: Ground, plan: Plan, variant: VariantSpec) -> Added:
    """A variant's part without a profile: its bytes are read once per step."""
    return Added(
        0.0, variant.weight_bytes / plan.tensor_parallel / ground.rates[0].memory_bytes_per_s, 0.0, 0.0
    )


def _decode(ground: Ground, plan: Plan) -> tuple[npt.NDArray[np.float64], float]:
    """Steps by rows without context, [MAX_ROWS + 1], and seconds for each cached token. Attention is linear
    in tokens; its slope comes from the largest load, which suffers least from rounding."""
    longest = _up_to(ground, LONG)
    short, long = (np.array([_step_s(ground, plan, rows, n) for rows in ROWS]) for n in (SHORT, longest))
    cached, most = (
        [
            load.input_tokens + load.output_tokens / 2
            for load in (_load(ground, plan, rows, n) for rows in ROWS)
        ]
        for n in (SHORT, longest)
    )
    context_s = max(0.0, float(long[-1] - short[-1]) / (ROWS[-1] * max(1.0, most[-1] - cached[-1])))
    rows = np.array(ROWS)
    bare = np.maximum.accumulate(short - context_s * rows * np.array(cached))
    curve = np.interp(np.arange(MAX_ROWS + 1), rows, np.maximum(bare, 1e-9))
    curve[0] = curve[1]
    return curve, context_s


def _prefill(ground: Ground, plan: Plan) -> npt.NDArray[np.float64]:
    """Steps by tokens of one prompt, [PREFILL_KNOTS + 1]; never faster with more tokens."""
    longest = min(plan.batched_tokens, plan.max_model_len - OUTPUT)
    lengths = np.unique(np.geomspace(1, longest, PROMPTS).astype(int))
    seconds = np.maximum.accumulate([_ttft_s(ground, plan, int(n)) for n in lengths])
    knots = np.arange(PREFILL_KNOTS + 1) * (plan.batched_tokens / PREFILL_KNOTS)
    inside = np.interp(knots, lengths, seconds)
    slope = (seconds[-1] - seconds[-2]) / (lengths[-1] - lengths[-2]) if len(lengths) > 1 else 0.0
    return np.asarray(inside + np.maximum(0.0, knots - lengths[-1]) * slope)


Mix = tuple[VariantSpec, ...]


def _up_to(ground: Ground, tokens: int) -> int:
    """The length of a prompt: `tokens`, or as many as the model takes."""
    return min(tokens, ground.spec.max_position - OUTPUT)


def _step_s(ground: Ground, plan: Plan, rows: int, tokens: int, mix: Mix = ()) -> float:
    return predict(_engine(ground), plan, _load(ground, plan, rows, tokens), mix).step_s.value


def _load(ground: Ground, plan: Plan, rows: int, tokens: int) -> Workload:
    """A load with answers long enough that all requests decode together after the last prompt is filled."""
    steps = math.ceil(rows * tokens / max(1, plan.batched_tokens - rows))
    longest = max(OUTPUT, ground.spec.max_position - tokens)
    return Workload(rows, tokens, min(longest, OUTPUT if steps == 1 else OUTPUT + 2 * steps))


def _ttft_s(ground: Ground, plan: Plan, tokens: int, mix: Mix = ()) -> float:
    return predict(_engine(ground), plan, Workload(1, tokens, OUTPUT), mix).ttft_s.value


def _engine(ground: Ground) -> Ground:
    """The ground without the request path, for the engine alone."""
    return dataclasses.replace(ground, path=None)
