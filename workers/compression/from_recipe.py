"""From a recipe of the control plane (recipe.py) to an artefact, through a user's request (request.py)."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from profiler.errors import AdapterError
from workers.compression.checks import ImplausibleBase
from workers.compression.choose import MethodName, Options
from workers.compression.job import CalibrationOptions
from workers.compression.lines import Artifact, quality_of
from workers.compression.recipe import CompressRequest, Recipe
from workers.compression.request import Report, Request
from workers.compression.run import run
from workers.compression.types import Progress
from workers.compression.work_folder import RESULT, OtherWork, path_for

_LEFT = re.compile(r", about [^,]+ left$")  # a line of progress has it as a number


def artifact_of(request: CompressRequest, progress: Progress) -> Artifact:
    """Carry out the request, or continue it. Raises the errors of `run`.

    An artefact without a record (the process was killed between its end and its record) is made again. So are
    layers that cannot be continued: another kind of device, or another version, made them.
    """
    if request.artifact.exists() and not (path_for(request.artifact) / RESULT).is_file():
        shutil.rmtree(request.artifact)

    def tell(share: float, doing: str) -> None:
        progress(share, _LEFT.sub("", doing))

    try:
        try:
            return _artifact(run(_request(request), tell))
        except OtherWork:
            for left in (path_for(request.artifact), request.artifact):
                shutil.rmtree(left, ignore_errors=True)
        return _artifact(run(_request(request), tell))
    except ImplausibleBase as error:
        raise AdapterError(
            f"{error}, or run `ostinato compress --force` and register the delta as an adapter"
        ) from error


def _request(request: CompressRequest) -> Request:
    recipe = request.recipe
    options = Options(
        MethodName(recipe.method), recipe.bits, recipe.ratio, recipe.group_size, recipe.max_widths
    )
    return Request(
        base=request.base,
        tuned=request.tuned,
        out=request.artifact,
        options=options,
        calibration=_calibration(recipe),
        device=request.device,
        evaluation=Path(recipe.evaluation) if recipe.evaluation else None,
        max_loss=recipe.max_loss,
        lossless=recipe.lossless,
    )


def _calibration(recipe: Recipe) -> CalibrationOptions | None:
    """The calibration options; None if the recipe has none: a method that needs calibration has defaults."""
    if not recipe.calibration and recipe.rows is None and recipe.tokens is None:
        return None
    file = Path(recipe.calibration) if recipe.calibration else None
    default = CalibrationOptions()
    return CalibrationOptions(file, recipe.rows or default.rows, recipe.tokens or default.tokens)


def _artifact(report: Report) -> Artifact:
    result = report.result
    if result.spec is None:
        raise ValueError(f"{report.options.method} makes no delta; choose a method that does")
    return Artifact(
        method=_named(report.options),
        kind=result.spec.kind.value,
        size_bytes=result.size_bytes,
        tuned_bytes=result.finetune_bytes,
        layer_errors=dict(result.layer_errors),
        warnings=tuple(result.warnings),
        seconds=result.seconds,
        quality=quality_of(report.quality),
    )


def _named(options: Options) -> str:
    """The method's name with its size: deltacompress (4 bits), deltamix (1/16)."""
    if options.ratio is not None:
        return f"{options.method} ({options.ratio:g})"
    return f"{options.method} ({options.bits} bits)" if options.bits is not None else options.method.value
