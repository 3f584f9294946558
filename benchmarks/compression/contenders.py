"""The methods that are compared, by the labels that results give them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from workers.compression.choose import MethodName, Options, method_of
from workers.compression.methods.deltamix import AS_PUBLISHED, Settings, deltamix_with
from workers.compression.types import Method

OURS: Mapping[str, Options] = {
    "deltacompress-4": Options(MethodName.deltacompress, bits=4),
    "deltacompress-2": Options(MethodName.deltacompress, bits=2),
    "sparse-gpt-4": Options(MethodName.sparse_gpt, bits=4),
    "deltamix-1/16": Options(MethodName.deltamix, ratio=1 / 16),
    "delta-come-1/16": Options(MethodName.delta_come, ratio=1 / 16),
    "bitdelta": Options(MethodName.bitdelta),
    "low-rank-1/16": Options(MethodName.low_rank, ratio=1 / 16),
    "deltamix-1/32": Options(MethodName.deltamix, ratio=1 / 32),
    "magnitude-4": Options(MethodName.magnitude, bits=4),
    "round-to-nearest-4": Options(MethodName.round_to_nearest, bits=4, group_size=128),
}
"""What matters most comes first: time may end."""

FITTED = Settings(whiten=True, search=True, count_u=True, sweeps=1, damping=0.01)
"""All that was added to the paper's to lower the error over calibration's inputs."""

ABLATIONS: Mapping[str, Settings] = {
    "deltamix-1/16 without RTC": Settings(correct_target=False),
    "deltamix-1/32 without RTC": Settings(ratio=1 / 32, correct_target=False),
    "deltamix-1/16 as published": AS_PUBLISHED,
    "deltamix-1/16 as published, without RTC": replace(AS_PUBLISHED, correct_target=False),
    "deltamix-1/16 damped by 0.01": Settings(damping=0.01),
    "deltamix-1/16 of the outputs": Settings(whiten=True),
    "deltamix-1/16 with searched grids": Settings(search=True),
    "deltamix-1/16 with U's losses counted": Settings(count_u=True),
    "deltamix-1/16 with a second round": Settings(sweeps=1),
    "deltamix-1/16 fitted to calibration": FITTED,
    "deltamix-1/32 fitted to calibration": replace(FITTED, ratio=1 / 32),
}

CORRECTION = ("deltamix-1/16 without RTC", "deltamix-1/32 without RTC")
"""The ablations that show what the reconstruction target correction does."""

ADAPTERS: Mapping[str, Options] = {"deltamix-1/64": Options(MethodName.deltamix, ratio=1 / 64)}
"""What compresses LoRA adapters: of rank 16 they take about 1/20 of this model's matrices themselves."""

CONTENDERS: Mapping[str, Callable[[], Method]] = {
    **{label: partial(method_of, options) for label, options in (*OURS.items(), *ADAPTERS.items())},
    **{label: partial(deltamix_with, settings) for label, settings in ABLATIONS.items()},
}


def chosen(labels: str | None, default: Sequence[str]) -> list[str]:
    """Those named, with semicolons between; without names `default`. Raises ValueError."""
    names = [*default] if labels is None else labels.split(";")
    if unknown := [name for name in names if name not in CONTENDERS]:
        raise ValueError(f"expected some of {'; '.join(CONTENDERS)}, got {'; '.join(unknown)}")
    return names


def method(label: str) -> Method:
    return CONTENDERS[label]()
