"""A user's request for a compression, and the report of the result."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from workers.compression.choose import MethodName, OptionError, Options, check, method_of
from workers.compression.job import CalibrationOptions
from workers.compression.result import Result


@dataclass(frozen=True)
class Request:
    """Compress `tuned` against `base` into the new folder `out`.

    `evaluation`: a file of tasks, or a folder of such files, to measure the loss. `max_loss`, in percent, is
    for the method auto, which needs both. `lossless`: compress files if loading becomes faster, from a
    storage of `storage_mb_per_s` (None: this machine's rate). The rest is as in `Job`.
    """

    base: Path
    tuned: Path
    out: Path
    options: Options
    calibration: CalibrationOptions | None = None
    device: str = "cpu"
    force: bool = False
    evaluation: Path | None = None
    max_loss: float | None = None
    lossless: bool = False
    storage_mb_per_s: float | None = None


@dataclass(frozen=True)
class Report:
    """The result of a compression.

    `options` are the chosen ones. `quality` (by task), `tried` (of auto) and `lossless` are for people, as in
    JSON, and empty if they were not requested.
    """

    result: Result
    options: Options
    quality: Sequence[Mapping[str, Any]] = ()
    tried: Sequence[Mapping[str, Any]] = ()
    lossless: Mapping[str, Any] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        found = {"quality": list(self.quality), "tried": list(self.tried), "lossless": dict(self.lossless)}
        return {**self.result.as_json(), "options": asdict(self.options), **found}


def check_request(request: Request) -> None:
    """Raises OptionError for options that do not go together."""
    check(request.options)
    auto = request.options.method is MethodName.auto
    if auto and request.max_loss is None:
        raise OptionError("max_loss", "the method auto needs the largest allowed loss in percent, such as 2")
    if request.max_loss is not None and not math.isfinite(request.max_loss):
        raise OptionError("max_loss", f"expected a finite percentage, got {request.max_loss:g}")
    if not auto and request.max_loss is not None:
        raise OptionError(
            "max_loss",
            f"only auto takes max_loss, not {request.options.method}; leave max_loss out, or choose auto",
        )
    if auto and request.evaluation is None:
        raise OptionError("evaluation", "the method auto needs a file of tasks to measure the loss on")
    rate = request.storage_mb_per_s
    if rate is not None and not (request.lossless and 0 < rate < math.inf):
        raise OptionError("storage_mb_per_s", "expected a rate above 0, together with lossless")
    if request.lossless and not auto and method_of(request.options).kind is None:
        raise OptionError(
            "lossless",
            f"{request.options.method} writes a checkpoint, but only deltas are packed; leave lossless out",
        )
