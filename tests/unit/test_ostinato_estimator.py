"""Our estimator of tables against a simulated machine, compared with MaverIQ's; its properties."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controlplane.baselines.estimators.evaluating import compare
from controlplane.baselines.estimators.laws import SHARPNESS, BatchLaw, smooth_max
from controlplane.baselines.estimators.maveriq import MaverIQ
from controlplane.baselines.estimators.ostinato import Ostinato
from controlplane.baselines.estimators.tables import Measurement
from controlplane.baselines.estimators.types import Family, NotPredictable, Prediction, Query
from testkit import artifact_simulator as sim
from testkit.artifact_simulator import Bench

FEW_MODELS = ("falcon-40b", "gptj-6b", "llama-2-7b", "llama-2-70b")
BATCHES = (1, 8, 32, 64)


@dataclass(frozen=True)
class Regime:
    """A machine, its noise, the prompts' length, and whether only three plans were fingerprinted."""

    machine: sim.Machine
    noise: float
    prompt_tokens: int
    few: bool

    def fingerprints(self) -> tuple[Measurement, ...]:
        bench = Bench(self.machine, self.noise, self.prompt_tokens, seed=1)
        return bench.measure(sim.fingerprints(self.few, (1, 2) if self.few else (1,), FEW_MODELS))

    def truth(self) -> tuple[Measurement, ...]:
        bench = Bench(self.machine, self.noise, self.prompt_tokens, seed=2)
        return bench.measure(sim.full_models(bench, BATCHES if self.few else (1,), models=FEW_MODELS))


@cache
def errors(
    estimator: Callable[..., MaverIQ | Ostinato], regime: Regime
) -> dict[int, tuple[float, float, float]]:
    """The errors by batch: see `by_batch`."""
    return by_batch(estimator(regime.fingerprints()), regime.truth())


def by_batch(
    estimator: MaverIQ | Ostinato, truth: Sequence[Measurement]
) -> dict[int, tuple[float, float, float]]:
    """Median error of latency and of memory, and the share of latencies in their interval."""
    found: dict[int, list[tuple[float, float, bool]]] = {}
    for c in compare(estimator, sim.table(truth)):
        assert c.prediction is not None
        assert c.prediction.memory_bytes is not None
        assert c.truth.memory_bytes is not None
        latency = abs(c.prediction.latency_s.value / c.truth.latency_s - 1)
        memory = abs(c.prediction.memory_bytes.value / c.truth.memory_bytes - 1)
        held = c.prediction.latency_s.holds(c.truth.latency_s)
        found.setdefault(c.truth.query.batch, []).append((latency, memory, held))
    return {batch: _summary(rows) for batch, rows in found.items()}


def _summary(rows: Sequence[tuple[float, float, bool]]) -> tuple[float, float, float]:
    middle = len(rows) // 2
    latencies, memories = sorted(row[0] for row in rows), sorted(row[1] for row in rows)
    return latencies[middle], memories[middle], sum(row[2] for row in rows) / len(rows)


slow = pytest.mark.slow  # the simulated machine takes its time; one regime of each kind is always run
ALL_PLANS = [
    (Regime(sim.A6000, 0.005, 923, few=False), 0.03),
    pytest.param(Regime(sim.PCIE_ONLY, 0.005, 923, few=False), 0.03, marks=slow),
    pytest.param(Regime(sim.H100, 0.005, 923, few=False), 0.03, marks=slow),
    pytest.param(Regime(sim.SLOW_COMPUTE, 0.005, 923, few=False), 0.03, marks=slow),
]
THREE_PLANS = [
    # The bound of the median at batches 1, 8, 32 and 64.
    (Regime(sim.A6000, 0.005, 10, few=True), (0.04, 0.10, 0.10, 0.12)),
    pytest.param(Regime(sim.PCIE_ONLY, 0.005, 10, few=True), (0.04, 0.10, 0.12, 0.12), marks=slow),
    pytest.param(Regime(sim.H100, 0.005, 10, few=True), (0.04, 0.10, 0.12, 0.20), marks=slow),
]


@pytest.mark.parametrize(("regime", "bound"), ALL_PLANS)
def test_batch_1_with_all_plans_fingerprinted(regime: Regime, bound: float) -> None:
    latency, memory, covered = errors(Ostinato, regime)[1]
    assert latency < bound
    assert memory < 0.02
    assert covered > 0.75
    assert latency < errors(MaverIQ, regime)[1][0]
    assert memory < errors(MaverIQ, regime)[1][1] + 0.002


@pytest.mark.parametrize(("regime", "bounds"), THREE_PLANS)
def test_batches_with_three_plans_fingerprinted(regime: Regime, bounds: tuple[float, ...]) -> None:
    ours, theirs = errors(Ostinato, regime), errors(MaverIQ, regime)
    for batch, bound in zip(BATCHES, bounds, strict=True):
        latency, memory, covered = ours[batch]
        assert latency < bound, f"batch {batch}: {latency:.1%}"
        assert memory < 0.06
        assert covered > 0.6
    assert ours[1][0] < theirs[1][0]
    assert ours[32][0] < theirs[32][0] + 0.02
    if regime.noise:
        assert ours[64][0] < theirs[64][0]


# The parts of fingerprints of pipelines that full models hide. All six models; fingerprints of up to 3
# layers.
SHALLOW_PIPELINES = [
    Bench(sim.SLOW_HOST, 0.004, 128),
    pytest.param(Bench(sim.WAITING, 0.004, 128), marks=slow),
    pytest.param(Bench(sim.SLOW_HOPS, 0.004, 128), marks=slow),
    # Effects that no law has: hosts that differ by family, and a host that only the first stage waits for.
    pytest.param(Bench(sim.UNLIKE_HOSTS, 0.004, 128), marks=slow),
    pytest.param(Bench(sim.SLOW_FIRST_STAGE, 0.004, 128), marks=slow),
    pytest.param(Bench(sim.A6000, 0.004, 128, engine_noise=0.03), marks=slow),
]


@pytest.mark.parametrize("bench", SHALLOW_PIPELINES)
def test_costs_of_shallow_pipelines_are_not_carried_to_full_models(bench: Bench) -> None:
    fingerprints = replace(bench, seed=1).measure(sim.fingerprints(False))
    again = replace(bench, seed=2)
    truth = again.measure(sim.full_models(again, (1,), (20, 100, 200)))

    ours, theirs = (by_batch(made(fingerprints), truth)[1] for made in (Ostinato, MaverIQ))
    assert ours[0] < min(0.045, theirs[0])
    assert ours[1] < min(0.015, 1.1 * theirs[1])
    assert ours[2] >= 0.9


@pytest.mark.parametrize(
    "machine", [sim.A6000, pytest.param(sim.WAITING, marks=slow), pytest.param(sim.SLOW_HOST, marks=slow)]
)
def test_each_batch_of_a_table_that_has_them_all(machine: sim.Machine) -> None:
    """No law of the batch need hold where every batch was measured."""
    bench, batches = Bench(machine, 0.004, 128, seed=1), (1, 2, 4, 8, 16, 32, 64)
    fingerprints = bench.measure(sim.fingerprints(False, batches, ("llama-2-7b", "gptj-6b")))
    again = replace(bench, seed=2)
    truth = again.measure(sim.full_models(again, batches, (20, 100), ("llama-2-7b", "gptj-6b")))
    ours, theirs = by_batch(Ostinato(fingerprints), truth), by_batch(MaverIQ(fingerprints), truth)
    assert ours.keys() == theirs.keys() == set(batches)
    for batch, (latency, memory, covered) in ours.items():
        assert latency < min(0.08, 1.1 * theirs[batch][0]), f"batch {batch}"
        assert memory < min(0.01, 1.1 * theirs[batch][1]), f"batch {batch}"
        assert covered >= 0.9, f"batch {batch}"


def test_batch_64_from_noisy_batches_1_and_2() -> None:
    """A family's own two batches say less of its growth than those of all families of the machine."""
    bench = Bench(sim.A6000, 0.01, 10, seed=4)
    models = ("falcon-40b", "gptj-6b", "llama-2-7b")
    estimator = Ostinato(bench.measure(sim.fingerprints(True, (1, 2), models)))
    exact = replace(bench, noise=0.0)
    queries = sim.full_models(exact, (64,), (100,), models)
    measured_tp = [query for query in queries if query.tensor_parallel <= 2 and query.pipeline_parallel <= 2]
    for row in exact.measure(measured_tp):
        assert estimator.predict(row.query).latency_s.value == pytest.approx(row.latency_s, rel=0.16)


def test_the_cost_of_tp_is_learnt_from_the_other_families() -> None:
    """One family's rows of TP=2 are 4% off in opposite ways: its deep model is not."""
    bench = Bench(replace(sim.A6000, prepare_s=0.0), 0.0, 128)
    rows = list(bench.measure(sim.fingerprints(True, (1,), FEW_MODELS)))
    family = Family("llama-2-7b", "int4", False)
    for at, row in enumerate(rows):
        query = row.query
        if query.family == family and query.tensor_parallel == 2 and query.output_tokens == 20:
            rows[at] = replace(row, latency_s=row.latency_s * (0.96 if query.layers == 2 else 1.04))
    (truth,) = bench.measure([Query(family, 2, (32,), 100, 1)])
    predicted = Ostinato(rows).predict(truth.query).latency_s
    assert predicted.value == pytest.approx(truth.latency_s, rel=0.15)


def test_buffers_of_every_pair_of_ranks_grow_with_the_square_of_tp() -> None:
    """The time that a run adds at TP=2 beyond TP=1 predicts that at TP=8, of which there are 56 pairs."""
    pair, own = 283 * sim.MIB, 38 * sim.MIB
    added = [
        replace(row, memory_bytes=(row.memory_bytes or 0) + extra, run_bytes=extra)
        for row in Bench(noise=0.0, prompt_tokens=64).measure(
            [
                *sim.fingerprints(False, (1,), ("llama-2-7b",)),
                *(Query(LLAMA, tp, (32,), 100, 1) for tp in (4, 8)),
            ]
        )
        for tp in (row.query.tensor_parallel,)
        for extra in (row.query.pipeline_parallel * (tp * own + tp * (tp - 1) * pair),)
    ]
    known = [row for row in added if row.query.tensor_parallel <= 2]
    estimator = Ostinato(known)
    for row in added[-2:]:
        found = estimator.predict(row.query).memory_bytes
        assert found is not None
        assert found.value == pytest.approx(row.memory_bytes, rel=0.05)


def test_intervals_widen_where_neither_batch_nor_tp_was_measured() -> None:
    def reach(batch: int, tp: int) -> tuple[float, float]:
        found = ESTIMATOR.predict(Query(LLAMA, tp, (32,), 100, batch))
        assert found.memory_bytes is not None
        return (
            found.latency_s.high / found.latency_s.value,
            found.memory_bytes.high / found.memory_bytes.value,
        )

    (latency, memory), (wide, _), (both, _) = reach(2, 2), reach(2, 8), reach(64, 8)
    assert reach(64, 2)[1] > memory + 0.1
    assert wide > latency
    assert both > reach(64, 2)[0] + 0.5


@slow
def test_more_batches_in_fingerprints_help() -> None:
    """A machine far from the usual roofline: two batches do not show it, four do."""
    few = Regime(sim.SLOW_COMPUTE, 0.005, 10, few=True)
    bench = Bench(few.machine, few.noise, few.prompt_tokens, seed=1)
    wide = bench.measure(sim.fingerprints(True, (1, 2, 16, 64), FEW_MODELS))
    truth = [row for row in few.truth() if row.query.batch == 64 and row.query.tensor_parallel <= 2]

    def median(estimator: Ostinato) -> float:
        off = [abs(estimator.predict(r.query).latency_s.value / r.latency_s - 1) for r in truth]
        return sorted(off)[len(off) // 2]

    assert median(Ostinato(wide)) < 0.06 < median(Ostinato(few.fingerprints()))


def test_uneven_stages_cost_a_single_batch_nothing() -> None:
    estimator = Ostinato(SMALL)
    even, uneven = (Query(LLAMA, 1, stages, 100, 1) for stages in ((16, 16), (10, 22)))
    assert estimator.predict(even) == estimator.predict(uneven)


LLAMA = Family("llama-2-7b", "float16", False)
SMALL = Bench(noise=0.01, prompt_tokens=64).measure(sim.fingerprints(True, (1, 2), ("llama-2-7b", "gptj-6b")))
ESTIMATOR = Ostinato(SMALL)
FAMILIES = sim.families(("llama-2-7b", "gptj-6b"))
QUERIES = st.builds(
    Query,
    st.sampled_from(FAMILIES),
    st.sampled_from([1, 2, 4, 8]),
    st.lists(st.integers(1, 40), min_size=1, max_size=8).map(tuple),
    st.integers(1, 2000),
    st.integers(1, 512),
)


def figures(found: Prediction) -> list[float]:
    assert found.memory_bytes is not None
    both = (found.latency_s, found.memory_bytes)
    return [figure for i in both for figure in (i.low, i.value, i.high)]


@given(QUERIES)
def test_intervals_hold_their_value_and_nothing_is_negative(query: Query) -> None:
    low, value, high, least, memory, most = figures(ESTIMATOR.predict(query))
    assert 0 <= low <= value <= high
    assert 0 <= least <= memory <= most
    assert value > 0


@given(QUERIES, st.integers(1, 100))
def test_more_work_never_takes_less(query: Query, more: int) -> None:
    once = ESTIMATOR.predict(query)
    first, *rest = query.layers_per_stage
    assert once.memory_bytes is not None
    for larger in (
        replace(query, batch=query.batch + more),
        replace(query, layers_per_stage=(first + more, *rest)),
        replace(query, output_tokens=query.output_tokens + more),
    ):
        found = ESTIMATOR.predict(larger)
        assert found.memory_bytes is not None
        assert found.latency_s.value >= once.latency_s.value * (1 - 1e-9)
        assert found.memory_bytes.value >= once.memory_bytes.value * (1 - 1e-9)


@settings(max_examples=max(1, settings().max_examples // 20))
@given(st.sampled_from([0.5, 2.0, 1e-3]), st.randoms(use_true_random=False))
def test_time_has_no_unit_and_rows_no_order(factor: float, random: object) -> None:
    rows = [replace(row, latency_s=row.latency_s * factor) for row in SMALL]
    random.shuffle(rows)  # type: ignore[attr-defined]
    scaled = Ostinato(rows)
    for query in (
        Query(LLAMA, 1, (32,), 100, 1),
        Query(LLAMA, 8, (32,), 50, 64),
        Query(LLAMA, 2, (9, 9), 9, 3),
    ):
        once, again = ESTIMATOR.predict(query), scaled.predict(query)
        assert again.latency_s.value == pytest.approx(once.latency_s.value * factor, rel=1e-3)
        assert again.latency_s.high == pytest.approx(once.latency_s.high * factor, rel=1e-2)
        assert again.memory_bytes == once.memory_bytes


def test_a_measured_plan_is_predicted() -> None:
    """The fit without noise returns the fingerprints themselves."""
    exact = Bench(noise=0.0, prompt_tokens=64).measure(sim.fingerprints(False, (1,), ("llama-2-7b",)))
    estimator = Ostinato(exact)
    for row in exact:
        found = estimator.predict(row.query)
        assert found.latency_s.value == pytest.approx(row.latency_s, rel=0.06)
        assert found.memory_bytes is not None
        assert found.memory_bytes.value == pytest.approx(row.memory_bytes, rel=0.03)


def test_an_outlier_does_little() -> None:
    rows = list(Bench(noise=0.003).measure(sim.fingerprints(False, (1,), ("llama-2-7b",))))
    query = Query(LLAMA, 1, (32,), 100, 1)
    before = Ostinato(rows).predict(query).latency_s.value
    at = next(
        i for i, r in enumerate(rows) if r.query.family == LLAMA and r.query.layers_per_stage == (1, 1, 1, 1)
    )
    rows[at] = replace(rows[at], latency_s=rows[at].latency_s * 1.5)
    assert Ostinato(rows).predict(query).latency_s.value == pytest.approx(before, rel=0.06)


def test_memory_is_not_needed_and_batches_may_start_above_1() -> None:
    rows = [replace(row, memory_bytes=None) for row in SMALL if row.query.batch == 2]
    found = Ostinato(rows).predict(Query(LLAMA, 2, (32,), 100, 16))
    assert found.memory_bytes is None
    assert found.latency_s.value == pytest.approx(
        ESTIMATOR.predict(Query(LLAMA, 2, (32,), 100, 16)).latency_s.value, rel=0.15
    )


def test_an_impossible_prediction_says_why() -> None:
    with pytest.raises(NotPredictable, match="no fingerprints of other float16"):
        ESTIMATOR.predict(Query(Family("other", "float16", False), 1, (32,), 100, 1))
    one_depth = [row for row in SMALL if row.query.layers == 1]
    with pytest.raises(NotPredictable, match="two depths"):
        Ostinato(one_depth).predict(Query(LLAMA, 1, (32,), 100, 1))
    sharded = [row for row in SMALL if row.query.tensor_parallel == 2]
    with pytest.raises(NotPredictable, match="TP=1 or less"):
        Ostinato(sharded).predict(Query(LLAMA, 1, (32,), 100, 1))


def test_10_000_predictions_in_a_second() -> None:
    queries = [
        Query(family, tp, sim.even(32, pp), output, batch)
        for family in FAMILIES
        for tp in (1, 2, 4, 8)
        for pp in range(1, 9)
        for output in range(10, 90, 10)
        for batch in range(1, 5)
    ][:10_000]
    assert len(queries) == 10_000
    started = time.process_time()
    for query in queries:
        ESTIMATOR.predict(query)
    assert time.process_time() - started < 4.0  # on an idle core below 1 s; this one may be shared


def inverse_smooth_max(ratio: float) -> float:
    """b with smooth_max(1, b) = ratio; 0 for a ratio of at most 1."""
    return float((ratio**SHARPNESS - 1) ** (1 / SHARPNESS)) if ratio > 1 else 0.0


@given(st.floats(0, 100), st.floats(0, 100))
def test_the_smooth_maximum_is_near_the_maximum(a: float, b: float) -> None:
    found = smooth_max(a, b)
    assert max(a, b) <= found <= max(a, b) * 2**0.25 * (1 + 1e-12)
    if 1e-3 < b < 100:
        assert inverse_smooth_max(smooth_max(1.0, b)) == pytest.approx(b, rel=0.05, abs=0.02)


@given(
    st.integers(1, 8), st.floats(1e-4, 1), st.floats(1e-3, 100), st.floats(1e-8, 1e-3), st.integers(1, 2000)
)
def test_batch_laws_start_at_1(reference: int, compute: float, prompt: float, kv: float, tokens: int) -> None:
    law = BatchLaw(reference, compute, prompt, kv, 0.01, 0.02, 1.1, float(tokens), 15.0)
    grown = (law.prefill, law.outside, law.allreduce, lambda batch: law.decode(batch, 15.0))
    for growth in grown:
        assert growth(reference) == pytest.approx(1.0)
        assert growth(reference + 1) >= growth(reference)
        assert growth(4 * reference) <= 4 * 1.1 + 1e-9
