"""2:4 pruning by magnitude and rounding to nearest: no calibration, seconds for a layer.

It is the fallback without texts, and the baseline that shows the gain of calibration.
"""

from __future__ import annotations

from profiler.variants.types import VariantKind
from workers.compression.types import Compressed, Encoded, Method, Problem
from workers.deltas import sparse
from workers.deltas.parts import sparse_parts


def magnitude(bits: int = 4, group_size: int | None = None) -> Method:
    """Keep the two largest of every four columns of the delta, in 4 or 2 bits.

    `group_size` is the number of columns that share a scale; None: one scale per row. The step raises
    ValueError for a layer whose inputs do not divide by 8 and by the group size. It also raises it for a
    delta that float16 scales cannot hold.
    """

    def step(problem: Problem) -> Compressed:
        code = sparse.encode(problem.delta, bits, group_size)
        encoded = Encoded(*sparse_parts(code))
        return Compressed(problem.base + sparse.decode(code), encoded.size_bytes, encoded)

    facts = {"bits": bits, "group_size": group_size}
    return Method("magnitude-2:4, round to nearest", VariantKind.SPARSE_DELTA, False, step, facts)
