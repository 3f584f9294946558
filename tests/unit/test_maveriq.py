"""MaverIQ's equations against figures worked out by hand, and its constants found again from their tables."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.baselines.estimators.maveriq import (
    EXPONENTS,
    Components,
    Exponents,
    MaverIQ,
    PipelineTerm,
    batched,
    extract,
    parallel_latency_s,
    parallel_memory,
)
from controlplane.baselines.estimators.maveriq_fit import Sample, fit, fit_formats
from controlplane.baselines.estimators.tables import GIB, Measurement
from controlplane.baselines.estimators.types import Family, NotPredictable, Query

FAMILY = Family("m", "float16", False)
SIMPLE = {("float16", False): Exponents(1.0, 1.0, 1.0, 1.0)}


def row(tp: int, stages: tuple[int, ...], output: int, batch: int, latency: float, gib: float) -> Measurement:
    return Measurement(Query(FAMILY, tp, stages, output, batch), latency, gib * GIB, 2)


# By hand. TP = 1, PP = 1, n = 1 and 2 layers, o = 10 and 20 tokens:
#   L[1,10] = 1.0, L[1,20] = 1.6, L[2,10] = 1.5, L[2,20] = 2.3
#   TPOT_layer = ((2.3 - 1.6) - (1.5 - 1.0)) / 10 = 0.02
#   TPOT_other = (1.6 - 1.0) / 10 - 0.02           = 0.04
#   TTFT_layer = (1.5 - 1.0) - 10 x 0.02           = 0.3
#   TTFT_other = 1.0 - 0.3 - 10 x (0.02 + 0.04)    = 0.1
# so 10 layers and 100 tokens take 10 x 0.3 + 0.1 + 100 x (10 x 0.02 + 0.04) = 3.1 + 24 = 27.1 = L(1,1).
# TP = 2: TPOT_layer 0.012, TPOT_other 0.03, TTFT_layer 0.2, TTFT_other 0.1: 2.1 + 100 x 0.15 = 17.1 = L(2,1);
# O_TP = 17.1 - 27.1 / 2 = 3.55.
# PP = 2, n = 2 and 3: TPOT_layer 0.02, TPOT_other 0.06, TTFT_layer 0.3, TTFT_other 0.2:
# 3.2 + 26 = 29.2 = L(1,2).
# Batch 2: TTFT doubles: L(1,1) = 30.2.
# Memory in GiB: TP = 1: 3 + 2 n, TP = 2: 4 + 2 n, PP = 2: 5 + 2 n; batch 2: 3.5 + 2.1 n at TP = PP = 1.
def line(figures: tuple[float, float, float, float], n: int, o: int) -> float:
    ttft_layer, ttft_other, tpot_layer, tpot_other = figures
    return n * ttft_layer + ttft_other + o * (n * tpot_layer + tpot_other)


def hand_made() -> list[Measurement]:
    rows = []
    for o in (10, 20):
        for n in (1, 2):
            rows.append(row(1, (n,), o, 1, line((0.3, 0.1, 0.02, 0.04), n, o), 3 + 2 * n))
            rows.append(row(2, (n,), o, 1, line((0.2, 0.1, 0.012, 0.03), n, o), 4 + 2 * n))
            rows.append(row(1, (n,), o, 2, line((0.6, 0.2, 0.02, 0.04), n, o), 3.5 + 2.1 * n))
            deep = (n, 1)
            rows.append(row(1, deep, o, 1, line((0.3, 0.2, 0.02, 0.06), n + 1, o), 5 + 2 * (n + 1)))
    return rows


def test_the_four_components_are_separated() -> None:
    seconds = {(1, 10): 1.0, (1, 20): 1.6, (2, 10): 1.5, (2, 20): 2.3}
    found = extract(lambda n, o: seconds[n, o], (1, 2), (10, 20))
    assert found.tpot_layer == pytest.approx(0.02)
    assert found.tpot_other == pytest.approx(0.04)
    assert found.ttft_layer == pytest.approx(0.3)
    assert found.ttft_other == pytest.approx(0.1)
    assert found.latency_s(10, 100) == pytest.approx(27.1)


def test_components_are_clamped_unless_asked_not_to_be() -> None:
    assert Components(-1, 2, -3, 4).clamped() == Components(0, 2, 0, 4)
    # The second layer made it quicker: TPOT_layer = ((1.4 - 1.6) - (0.9 - 1.0)) / 10 = -0.01,
    # TPOT_other = 0.07, TTFT_layer = -0.1 + 0.1 = 0, TTFT_other = 1 - 10 x 0.06 = 0.4. For 10 layers and
    # 100 tokens: 0.4 + 100 x 0.07 = 7.4 with the clamp, 100 x 0.1 = 10 less without.
    odd = [row(1, (1,), 10, 1, 1.0, 1), row(1, (1,), 20, 1, 1.6, 1)]
    odd += [row(1, (2,), 10, 1, 0.9, 1), row(1, (2,), 20, 1, 1.4, 1)]
    query = Query(FAMILY, 1, (10,), 100, 1)
    assert MaverIQ(odd).predict(query).latency_s.value == pytest.approx(7.4)
    assert MaverIQ(odd, clamp_components=False).predict(query).latency_s.value == 0.0


# Equation 2 with all constants 1: L(2,2) = 27.1 / 4 + 1 / 2 x 3.55 + O_PP
#   code:  O_PP = 27.1 x (1 - 1/2) = 13.55:  6.775 + 1.775 + 13.55 = 22.1
#   paper: O_PP = 29.2 - 13.55     = 15.65:  6.775 + 1.775 + 15.65 = 24.2
# L(4,1) = 27.1 / 4 + 3 x 3.55 = 17.425
@pytest.mark.parametrize(
    ("tp", "stages", "term", "expected"),
    [
        (1, (10,), PipelineTerm.CODE, 27.1),
        (2, (10,), PipelineTerm.CODE, 17.1),
        (4, (10,), PipelineTerm.CODE, 17.425),
        (2, (5, 5), PipelineTerm.CODE, 22.1),
        (2, (3, 7), PipelineTerm.PAPER, 24.2),
        (1, (3, 7), PipelineTerm.PAPER, 29.2),
    ],
)
def test_latency_equals_that_by_hand(
    tp: int, stages: tuple[int, ...], term: PipelineTerm, expected: float
) -> None:
    estimator = MaverIQ(hand_made(), exponents=SIMPLE, pipeline_term=term)
    found = estimator.predict(Query(FAMILY, tp, stages, 100, 1)).latency_s
    assert found.value == pytest.approx(expected)
    assert found.low < found.value < found.high


def test_the_published_constants_by_hand() -> None:
    # fp16: L(4,2) of L(1,1) = 10, O_TP = 1: 10 / (4 x 2^.0491) + 3^.6858 / 2^.1877 + 10 x (1 - 2^-.0491)
    #     = 10 / 4.13848 + 2.12425 / 1.13895 + 0.33461 = 2.41635 + 1.86510 + 0.33461 = 4.61606
    by = EXPONENTS["float16", False]
    found = parallel_latency_s(4, 2, 10.0, 1.0, 10 - 10 / 2**0.0491, by)
    assert found == pytest.approx(4.61606, abs=2e-4)
    assert set(EXPONENTS) >= {("float16", False), ("float16", True), ("int8", False), ("int4", False)}
    assert EXPONENTS["int4_gptq", False] == Exponents(0.0584, 0.5912, 0.6822, 0.4356)


# Memory of 10 layers in GiB: W + A = 23; A = 24 - 23 = 1; A_p = 25 - 23 = 2.
# TP = 2, PP = 2: 23 + 1 + 2 x 1 x 2 = 28. TP = 4: 26.
@pytest.mark.parametrize(
    ("tp", "stages", "gib"), [(1, (10,), 23), (4, (10,), 26), (2, (4, 6), 28), (1, (4, 6), 25)]
)
def test_memory_equals_that_by_hand(tp: int, stages: tuple[int, ...], gib: float) -> None:
    found = MaverIQ(hand_made()).predict(Query(FAMILY, tp, stages, 100, 1)).memory_bytes
    assert found is not None
    assert found.value == pytest.approx(gib * GIB)
    assert parallel_memory(2, 2, 23, -1, 2) == 27  # a negative A counts as none


def test_batches_equal_those_by_hand() -> None:
    # L(2) - L(1) = 30.2 - 27.1 = 3.1, so L(8) = 27.1 + 7 x 3.1 = 48.8.
    # Memory: 24.5 - 23 = 1.5, so M(8) = 23 + 10.5 = 33.5.
    found = MaverIQ(hand_made()).predict(Query(FAMILY, 1, (10,), 100, 8))
    assert found.latency_s.value == pytest.approx(48.8)
    assert found.memory_bytes is not None
    assert found.memory_bytes.value == pytest.approx(33.5 * GIB)
    assert batched(5.0, 4.0, 9) == 5.0


def test_an_impossible_prediction_says_why() -> None:
    estimator = MaverIQ(hand_made())
    for query, words in (
        (Query(replace(FAMILY, dtype="fp8"), 1, (10,), 100, 1), "no constants for fp8"),
        (Query(replace(FAMILY, model="other"), 1, (10,), 100, 1), "no fingerprints"),
        (Query(FAMILY, 2, (10,), 100, 8), "TP=2 PP=1 batch 2"),
    ):
        with pytest.raises(NotPredictable, match=words):
            estimator.predict(query)


def test_a_model_that_cannot_be_sharded_needs_no_second_gpu() -> None:
    alone = [r for r in hand_made() if r.query.tensor_parallel == 1]
    assert MaverIQ(alone).predict(Query(FAMILY, 1, (10,), 100, 1)).latency_s.value == pytest.approx(27.1)
    with pytest.raises(NotPredictable, match="TP=2"):
        MaverIQ(alone).predict(Query(FAMILY, 2, (10,), 100, 1))


def samples(by: Exponents, noise: float = 0.0) -> list[Sample]:
    random = np.random.default_rng(3)
    found = []
    for reference, overhead in ((2.0, 0.3), (5.0, 0.4), (3.0, 1.1)):
        second = reference * 1.02
        for tp, pp in ((1, 1), (1, 2), (1, 4), (1, 8), (2, 1), (2, 2), (2, 4), (4, 1), (4, 2), (8, 1)):
            latency = parallel_latency_s(tp, pp, reference, overhead, second - reference / 2**by.alpha, by)
            latency *= float(np.exp(random.normal(0, noise)))
            found.append(Sample(tp, pp, reference, overhead, second, latency))
    return found


@pytest.mark.parametrize("by", [Exponents(0.15, 0.8, 0.5, 0.9), Exponents(0.05, 0.69, 0.19, 0.57)])
def test_constants_are_found_again(by: Exponents) -> None:
    found = fit(samples(by))
    for name in ("alpha", "beta", "gamma", "delta"):
        assert getattr(found, name) == pytest.approx(getattr(by, name), abs=2e-3)
    assert fit(samples(by)) == found


def test_noisy_constants_predict_as_well_as_true_ones() -> None:
    by = Exponents(0.15, 0.8, 0.5, 0.9)
    noisy = samples(by, 0.02)

    def error(constants: Exponents) -> float:
        return float(
            np.mean(
                [
                    abs(
                        parallel_latency_s(
                            s.tensor_parallel,
                            s.pipeline_parallel,
                            s.reference,
                            s.tp_overhead,
                            s.second_stage - s.reference / 2**constants.alpha,
                            constants,
                        )
                        / s.latency_s
                        - 1
                    )
                    for s in noisy
                ]
            )
        )

    assert error(fit(noisy)) <= error(by)


def test_constants_come_from_tables() -> None:
    by = Exponents(0.3, 0.9, 0.4, 0.7)
    estimator = MaverIQ(hand_made(), exponents={("float16", False): by})
    plans = [
        (1, (10,)),
        (1, (5, 5)),
        (1, (4, 3, 3)),
        (2, (10,)),
        (2, (5, 5)),
        (4, (10,)),
        (4, (5, 5)),
        (8, (10,)),
    ]
    truth = [
        row(tp, stages, o, 1, estimator.latency_s(Query(FAMILY, tp, stages, o, 1), 1), 1)
        for tp, stages in plans
        for o in (20, 100)
    ]
    found = fit_formats(hand_made(), truth)
    refitted = MaverIQ(hand_made(), exponents=found)
    for measured in truth:
        assert refitted.latency_s(measured.query, 1) == pytest.approx(measured.latency_s, rel=2e-3)
    assert found["int8", False] == EXPONENTS["int8", False]
    with pytest.raises(ValueError, match="at least one"):
        fit([])


@given(st.integers(1, 8), st.integers(1, 8), st.floats(0, 10), st.floats(-1, 1), st.floats(-1, 1))
def test_equation_2_is_linear_in_time(tp: int, pp: int, reference: float, o_tp: float, o_pp: float) -> None:
    by = EXPONENTS["int8", False]
    once = parallel_latency_s(tp, pp, reference, o_tp, o_pp, by)
    assert once >= 0
    assert parallel_latency_s(tp, pp, 2 * reference, 2 * o_tp, 2 * o_pp, by) == pytest.approx(2 * once)
