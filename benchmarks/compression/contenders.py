"""The methods that are compared, by the labels that results and plots give them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from workers.compression.choose import MethodName, Options, method_of
from workers.compression.types import Method

CONTENDERS: Mapping[str, Options] = {
    "deltacompress-4": Options(MethodName.deltacompress, bits=4),
    "deltacompress-2": Options(MethodName.deltacompress, bits=2),
    "sparse-gpt-4": Options(MethodName.sparse_gpt, bits=4),
    "deltamix-1/16": Options(MethodName.deltamix, ratio=1 / 16),
    "delta-come-1/16": Options(MethodName.delta_come, ratio=1 / 16),
    "bitdelta": Options(MethodName.bitdelta),
    "low-rank-1/16": Options(MethodName.low_rank, ratio=1 / 16),
    "deltamix-1/32": Options(MethodName.deltamix, ratio=1 / 32),
    "magnitude-4": Options(MethodName.magnitude, bits=4),
    "round-to-nearest-4": Options(MethodName.round_to_nearest, bits=4),
}
"""What matters most comes first: time may end."""


def chosen(labels: str | None) -> dict[str, Options]:
    """Those named, with commas between; all without names. Raises ValueError."""
    names: Sequence[str] = [*CONTENDERS] if labels is None else labels.split(",")
    if unknown := [name for name in names if name not in CONTENDERS]:
        raise ValueError(f"expected some of {', '.join(CONTENDERS)}, got {', '.join(unknown)}")
    return {name: CONTENDERS[name] for name in names}


def method(label: str) -> Method:
    return method_of(CONTENDERS[label])
