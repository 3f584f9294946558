"""evaluate-estimator: tables of measurements against predictions, computed by this process."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from controlplane import errors
from controlplane.baselines.estimators.types import Calibration, EstimatorName
from controlplane.cli.output import print_facts, print_json, print_table
from controlplane.cli.session import Json, session
from profiler.errors import CheckpointError

if TYPE_CHECKING:
    from controlplane.baselines.estimators.evaluating import Errors, Group, Report

MAX_REASONS = 10


def evaluate_estimator(
    ctx: typer.Context,
    *,
    fingerprints: Annotated[Path, typer.Option(help="The table of fingerprints (docs/profiler.md).")],
    truth: Annotated[Path, typer.Option(help="The table of full models, with the same columns.")],
    estimator: Annotated[EstimatorName, typer.Option(help="Ours, or MaverIQ's.")] = EstimatorName.OSTINATO,
    calibrate: Annotated[
        Calibration, typer.Option(help="Whether to fit hardware constants on the truth of the other models.")
    ] = Calibration.NONE,
    json: Json = False,
) -> None:
    """Predict measured plans from fingerprints, and print the errors of the predictions."""
    cli = session(ctx)
    from controlplane.baselines.estimators.evaluating import evaluate
    from controlplane.baselines.estimators.tables import read_table

    try:
        report = evaluate(read_table(fingerprints), read_table(truth), estimator, calibrate)
    except CheckpointError as error:
        raise errors.SourceUnreadable(f"{error}; docs/profiler.md describes the tables") from error
    if cli.json:
        print_json(_document(report))
        return
    print_facts(_facts(report))
    print_table(COLUMNS, (_row(group) for group in report.groups), "no rows")


COLUMNS = (
    *("BY", "", "ROWS", "PREDICTED"),
    *("LATENCY MEDIAN", "P90", "COVERED"),
    *("MEMORY MEDIAN", "P90", "COVERED"),
)


def _facts(report: Report) -> Iterator[tuple[str, str]]:
    yield "estimator", report.estimator
    yield "calibration", str(report.calibration)
    yield "fingerprints", f"{report.fingerprints} rows{_failed(report.fingerprint_failures)}"
    yield "truth", f"{report.overall.rows} plans{_failed(report.truth_failures)}"
    yield "not predicted", str(report.overall.rows - report.overall.predicted)
    reasons = sorted(report.reasons.items(), key=lambda item: -item[1])
    for reason, count in reasons[:MAX_REASONS]:
        yield f"  {count}", reason
    if len(reasons) > MAX_REASONS:
        yield "  ...", f"{len(reasons) - MAX_REASONS} more reasons; --json has all"


def _failed(failures: dict[str, int]) -> str:
    if not failures:
        return ""
    return "; without figures: " + ", ".join(f"{count} ({reason})" for reason, count in failures.items())


def _row(group: Group) -> tuple[str, ...]:
    counts = (group.by, group.value, str(group.rows), str(group.predicted))
    return (*counts, *_shares(group.latency), *_shares(group.memory))


def _shares(deviations: Errors | None) -> tuple[str, str, str]:
    if deviations is None:
        return ("-", "-", "-")
    return (f"{deviations.median:.2%}", f"{deviations.p90:.2%}", f"{deviations.covered:.0%}")


def _document(report: Report) -> dict[str, Any]:
    return {
        "estimator": report.estimator,
        "calibration": str(report.calibration),
        "fingerprints": {"rows": report.fingerprints, "failed": report.fingerprint_failures},
        "truth": {"plans": report.overall.rows, "failed": report.truth_failures},
        "notPredicted": report.reasons,
        "groups": [asdict(group) for group in report.groups],
    }
