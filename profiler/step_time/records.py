"""What is known at run time of an engine's steps and of each variant's part in them. Seconds and tokens.

The time of a step is

    decode_s[rows] + context_s * context + sum over rows of row_s + sum over distinct variants of variant_s
    + any_s if there is a variant + sum over kinds present of launch_s
    + padded_s * rows with a rank * largest rank

where `decode_s` is the base's own curve. Everything except the curve and the largest rank is a sum over the
batch. So a batch is kept as sums, and adding or removing a request changes a few numbers. CaraServe (section
5) has the last term for kernels that pad (BGMV), and a `row_s` in proportion to the rank for kernels that do
not pad (MBGMV, ours).

Steps of many tokens are wide: their kernels use wider tiles, so that a variant with a single row takes as
long as one with a full tile. Separate numbers give the time of variants in a wide step, which includes the
prompts' variants.
"""

from __future__ import annotations

import numpy as np

MAX_ROWS = 512  # requests in a batch; for more, the curve's last two points are extrapolated
PREFILL_KNOTS = 1024
KINDS = 4  # of variants, numbered as in KIND_NUMBERS
KIND_NUMBERS = {"lora": 0, "boft": 1, "sparse_delta": 2, "svd_delta": 3}
BASE_KIND = -1

# The steps of one plan on one kind of device. `decode_s[n]`: a step with n decoding requests without cached
# tokens. `prefill_s[k]`: a step that fills `k * prefill_grain` prompt tokens. `path_s`: from the client to
# the engine and back. `batched_tokens`: the most that a step takes. `wide_from`: the number of tokens from
# which a step is wide; 0: no step is wide.
STEP_MODEL = np.dtype(
    [
        ("decode_s", "f8", (MAX_ROWS + 1,)),
        ("prefill_s", "f8", (PREFILL_KNOTS + 1,)),
        ("prefill_grain", "f8"),
        ("context_s", "f8"),
        ("padded_s", "f8"),
        ("launch_s", "f8", (KINDS,)),
        ("wide_launch_s", "f8", (KINDS,)),
        ("any_s", "f8"),
        ("path_s", "f8"),
        ("batched_tokens", "i8"),
        ("wide_from", "i8"),
        ("max_rows", "i8"),
        ("kv_tokens", "i8"),
        ("slots", "i8"),
    ],
    align=True,
)

# One variant in engines with one step model. `row_s`: what each of its rows adds to a step. `variant_s`: what
# it adds once to a step with any of its rows. `token_s`: what each of its prompt tokens adds. `wide_*`: the
# last two in a wide step. `load_s`: the time from the host's memory to a slot. `fetch_s`: the time from its
# storage to the host's memory. Row 0 is the base.
VARIANT = np.dtype(
    [
        ("row_s", "f8"),
        ("variant_s", "f8"),
        ("token_s", "f8"),
        ("wide_variant_s", "f8"),
        ("wide_token_s", "f8"),
        ("load_s", "f8"),
        ("fetch_s", "f8"),
        ("bytes", "f8"),
        ("rank", "i4"),
        ("rank_class", "i4"),
        ("kind", "i4"),
        ("weight", "f4"),
    ],
    align=True,
)

# Ranks are counted by class; these are the largest ranks of each class.
RANK_CLASSES = (0, 8, 16, 32, 64, 128, 256, 512)
CLASSES = len(RANK_CLASSES)

# The sums over a batch. `ranked` rows have a rank; `by_class` counts rows by their rank's class.
BATCH = np.dtype(
    [
        ("rows", "i8"),
        ("context", "f8"),
        ("rows_s", "f8"),
        ("variants_s", "f8"),
        ("wide_variants_s", "f8"),
        ("ranked", "i8"),
        ("by_class", "i4", (CLASSES,)),
        ("by_kind", "i4", (KINDS,)),
    ],
    align=True,
)


def rank_class(rank: int) -> int:
    """The first class with room for `rank`; the last class for any larger rank."""
    return next((number for number, largest in enumerate(RANK_CLASSES) if rank <= largest), CLASSES - 1)
