"""Find values that are not finite: in a NaN or an infinity all exponent bits are ones. Compiled, because a
loader checks gigabytes while a request waits."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from profiler.compiled import compiled

# The exponent's bits, and the unsigned type of the same width.
EXPONENTS: dict[str, tuple[type[np.unsignedinteger[Any]], int]] = {
    "F16": (np.uint16, 0x7C00),
    "BF16": (np.uint16, 0x7F80),
    "F32": (np.uint32, 0x7F800000),
}
_SEARCHED = 4096  # values that are checked together


def not_finite(data: memoryview, dtype: str) -> int | None:
    """The index of the first value that is not finite; None if there is none, or the type cannot hold any."""
    if dtype not in EXPONENTS:
        return None
    kind, mask = EXPONENTS[dtype]
    at = int(first_with_all(np.frombuffer(data, dtype=kind), mask))
    return None if at < 0 else at


@compiled
def first_with_all(words: npt.NDArray[np.unsignedinteger[Any]], mask: int) -> int:
    """The index of the first word that contains all bits of `mask`; -1: none."""
    for start in range(0, len(words), _SEARCHED):
        some = words[start : start + _SEARCHED]
        found = 0
        for i in range(len(some)):
            found += (some[i] & mask) == mask
        if found:
            for i in range(len(some)):
                if (some[i] & mask) == mask:
                    return start + i
    return -1
