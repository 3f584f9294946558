"""Joining truth and predictions: the statistics by hand, and that truth never reaches a prediction of it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import pytest

from controlplane.baselines.estimators.evaluating import build, compare, evaluate
from controlplane.baselines.estimators.tables import Measurement, Table
from controlplane.baselines.estimators.types import (
    Calibration,
    EstimatorName,
    Family,
    Interval,
    NotPredictable,
    Prediction,
    Query,
)
from testkit import artifact_simulator as sim

MODELS = ("falcon-7b", "gptj-6b", "llama-2-7b")
BENCH = sim.Bench(noise=0.004, prompt_tokens=64, seed=4)
FORMATS = ("float16", "int8")


def of_few_formats(queries: Iterable[Query]) -> list[Query]:
    """Each format of a model is a fit of its own."""
    return [query for query in queries if query.family.dtype in FORMATS and not query.family.int8_kv]


FINGERPRINTS = sim.table(BENCH.measure(of_few_formats(sim.fingerprints(True, (1, 2), MODELS))))
# A machine whose full models are 20% slower than their fingerprints say, as with clocks that fall under load.
TRUTH = sim.table(
    replace(row, latency_s=1.2 * row.latency_s)
    for row in BENCH.measure(of_few_formats(sim.full_models(BENCH, (1, 8), models=MODELS)))
)


@dataclass(frozen=True)
class Fixed:
    """Says 10 s and 100 bytes, within a tenth, of every model but one."""

    name: str = "fixed"

    def predict(self, query: Query) -> Prediction:
        if query.family.model == "unknown":
            raise NotPredictable("no fingerprints")
        memory = Interval(100, 90, 110) if query.batch == 1 else None
        return Prediction(Interval(10, 9, 11), memory)


def truth(model: str, batch: int, latency: float, memory: float | None, dtype: str = "int8") -> Measurement:
    return Measurement(Query(Family(model, dtype, False), 1, (32,), 100, batch), latency, memory, 2)


def test_statistics_equal_those_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = (
        truth("a", 1, 10.0, 100.0),  # exact
        truth("a", 8, 12.5, 50.0),  # |10 / 12.5 - 1| = 20%, outside of 9 to 11; memory not predicted
        truth("b", 1, 8.0, 80.0, "int4"),  # 25%, outside; memory 25%, outside
        truth("b", 1, 8.0, None, "int4"),  # a replicate
        truth("unknown", 1, 1.0, 1.0),
    )
    monkeypatch.setattr("controlplane.baselines.estimators.evaluating.build", lambda *_: Fixed())
    report = evaluate(sim.table(()), Table("t", rows, ()), EstimatorName.OSTINATO)
    overall = report.overall
    assert (overall.rows, overall.predicted) == (4, 3)
    assert report.reasons == {"no fingerprints": 1}
    assert overall.latency is not None
    assert overall.memory is not None
    assert overall.latency.median == pytest.approx(0.20)
    assert overall.latency.p90 == pytest.approx(
        0.24
    )  # numpy's: a tenth of the way back from 25% to 20% is 24.0%
    assert overall.latency.covered == pytest.approx(1 / 3)
    assert overall.memory.rows == 2
    assert overall.memory.median == pytest.approx(0.125)
    by = {(group.by, group.value): group for group in report.groups}
    assert list(by) == [
        ("overall", ""),
        *(("model", "a"), ("model", "b"), ("model", "unknown")),
        *(("batch", "1"), ("batch", "8")),
        *(("format", "int4"), ("format", "int8")),
    ]
    assert by["model", "unknown"].latency is None
    assert by["batch", "8"].memory is None
    assert by["format", "int4"].latency == by["model", "b"].latency


@pytest.mark.parametrize("name", EstimatorName)
def test_truth_does_not_reach_predictions(name: EstimatorName) -> None:
    other = sim.table(replace(row, latency_s=7 * row.latency_s, memory_bytes=1.0) for row in TRUTH.rows)
    once, again = (compare(build(FINGERPRINTS, table, name), table) for table in (TRUTH, other))
    assert [c.prediction for c in once] == [c.prediction for c in again]


@pytest.mark.parametrize(
    "name", [EstimatorName.OSTINATO, pytest.param(EstimatorName.MAVERIQ, marks=pytest.mark.slow)]
)
def test_a_models_own_truth_does_not_reach_its_calibrated_predictions(name: EstimatorName) -> None:
    def changed(row: Measurement) -> Measurement:
        return replace(row, latency_s=3.0) if row.query.family.model == "gptj-6b" else row

    other = sim.table(map(changed, TRUTH.rows))
    method = Calibration.LEAVE_ONE_MODEL_OUT
    once, again = (compare(build(FINGERPRINTS, table, name, method), table) for table in (TRUTH, other))
    same = [a.prediction == b.prediction for a, b in zip(once, again, strict=True)]
    own = [c.truth.query.family.model == "gptj-6b" for c in once]
    assert all(equal for equal, is_own in zip(same, own, strict=True) if is_own)
    assert not all(same)


def test_calibration_finds_what_fingerprints_do_not_show() -> None:
    plain = evaluate(FINGERPRINTS, TRUTH, EstimatorName.OSTINATO)
    calibrated = evaluate(FINGERPRINTS, TRUTH, EstimatorName.OSTINATO, Calibration.LEAVE_ONE_MODEL_OUT)
    assert plain.overall.latency is not None
    assert calibrated.overall.latency is not None
    assert plain.overall.latency.median > 0.12
    assert calibrated.overall.latency.median < 0.06
    assert "other models" in calibrated.estimator
    assert calibrated.calibration is Calibration.LEAVE_ONE_MODEL_OUT


def test_one_model_alone_cannot_be_calibrated() -> None:
    one = sim.table(row for row in TRUTH.rows if row.query.family.model == "gptj-6b")
    plain, calibrated = (evaluate(FINGERPRINTS, one, EstimatorName.OSTINATO, c) for c in Calibration)
    assert plain.groups == calibrated.groups


def test_rows_without_fingerprints_are_counted_with_the_reason() -> None:
    known = sim.table(row for row in FINGERPRINTS.rows if row.query.family.model != "gptj-6b")
    report = evaluate(known, TRUTH, EstimatorName.OSTINATO)
    assert report.overall.rows - report.overall.predicted == sum(report.reasons.values()) > 0
    assert "no fingerprints of gptj-6b float16" in report.reasons
