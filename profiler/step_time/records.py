"""What is known, when an engine runs, of its steps and of each variant's part in them. Seconds and tokens.

A step is costed as

    decode_s[rows] + context_s * context + sum over rows of row_s + sum over distinct variants of variant_s
    + any_s if there is a variant + sum over kinds present of launch_s
    + padded_s * rows with a rank * largest rank

where `decode_s` is the base's own curve. Everything in it is a sum over the batch but the curve and the
largest rank, so a batch is kept as sums and one request more or less changes a few numbers. CaraServe
(section 5) has the last term for kernels that pad (BGMV), and `row_s` in proportion to the rank for
those that do not (MBGMV, ours).

Steps of many tokens are wide: kernels work in them on wider tiles, so that a variant with a single row takes
as long as one with a tile's. What variants take in a wide step has numbers of its own, and counts those of
prompts as well.
"""

from __future__ import annotations

import numpy as np

MAX_ROWS = 512  # requests in a batch; a step with more is taken for the last two of the curve, drawn on
PREFILL_KNOTS = 1024
KINDS = 4  # of variants, numbered as in KIND_NUMBERS
KIND_NUMBERS = {"lora": 0, "boft": 1, "sparse_delta": 2, "svd_delta": 3}
BASE_KIND = -1

# Of one plan on one kind of device. `decode_s[n]`: a step with n decoding requests, none of them with tokens
# cached. `prefill_s[k]`: a step that fills `k * prefill_grain` prompt tokens. `path_s`: from the client to
# the engine and back. `batched_tokens`: the most a step takes. `wide_from`: tokens from which on a step is
# wide; 0: none is.
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

# Of one variant in engines with one step model: what each of its rows adds to a step, what it adds once to a
# step with any of its rows, what each of its prompt tokens adds; the last two in a wide step; and how long
# it takes to a slot from the host's memory (`load_s`), and to there from where it is stored (`fetch_s`).
# Row 0 is the base.
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

# Ranks are counted by class: the largest rank of each.
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
    """The first class that has room for `rank`; the last one for any larger."""
    return next((number for number, largest in enumerate(RANK_CLASSES) if rank <= largest), CLASSES - 1)
