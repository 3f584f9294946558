"""DeltaZip's deltacompress (section 4, algorithm 1) of the difference from the base.

SparseGPT's column loop makes it 2:4 sparse and rounds it to 4 or 2 bits. The layer's inputs are those of the
compressed layers before it, with the base added back; calibration provides them. Columns are taken in their
order, not sorted by activation.
"""

from __future__ import annotations

from profiler.variants.types import VariantKind
from workers.compression.two_of_four import encode
from workers.compression.types import Compressed, Encoded, Method, Problem
from workers.deltas import sparse
from workers.deltas.parts import sparse_parts


def deltacompress(bits: int = 4, group_size: int | None = None, refit: bool = True) -> Method:
    """`bits`: 4 or 2. `group_size` columns share a scale; None: one scale per row.

    `refit` is an addition to the paper. The loop runs with scales of several sizes. Each scale is fitted to
    the chosen codes, by least squares under the layer's inputs, and each row keeps the version with the least
    loss. That gains most at 2 bits. False is the paper's method.
    """

    def step(problem: Problem) -> Compressed:
        code = encode(problem.delta, problem.gram, bits, group_size, refit)
        encoded = Encoded(*sparse_parts(code))
        return Compressed(problem.base + sparse.decode(code), encoded.size_bytes, encoded)

    name = f"deltacompress: SparseGPT on the difference, 2:4, {bits} bits{', scales fitted' if refit else ''}"
    facts = {"bits": bits, "group_size": group_size}
    return Method(name, VariantKind.SPARSE_DELTA, calibrated=True, step=step, facts=facts)
