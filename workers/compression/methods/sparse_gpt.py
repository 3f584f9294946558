"""SparseGPT on whole weights, 2:4 and rounded: the comparison in DeltaZip (table 1, 4 bits)."""

from __future__ import annotations

from workers.compression.two_of_four import encode
from workers.compression.types import Compressed, Encoded, Method, Problem
from workers.deltas import sparse
from workers.deltas.parts import sparse_parts


def sparse_gpt(bits: int = 4, group_size: int | None = None) -> Method:
    """`bits`: 4 or 2. `group_size` columns share a scale; None: one scale per row. The base is not used.

    The size is that of the sparse format: bits/2 + 1 bits per weight, and float16 scales.
    """

    def step(problem: Problem) -> Compressed:
        code = encode(problem.tuned, problem.gram, bits, group_size, refit=False)
        return Compressed(sparse.decode(code), Encoded(*sparse_parts(code)).size_bytes)

    facts = {"bits": bits, "group_size": group_size}
    return Method(f"sparse-gpt: whole weights, 2:4, {bits} bits", None, True, step, facts)
