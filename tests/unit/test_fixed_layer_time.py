"""The part of a layer's time that no bytes explain: a closed form that has it, predicted from shallow rows of
batches 1 and 2."""

from __future__ import annotations

import itertools

import pytest

from controlplane.baselines.estimators.ostinato import Ostinato
from controlplane.baselines.estimators.tables import Measurement
from controlplane.baselines.estimators.types import Family, Query
from testkit.artifact_simulator import SHAPES

BYTES_PER_S, FLOPS_PER_BYTE = 700e9, 135.0
LAUNCH_S, PREPARE_S = 30e-6, 30e-6  # of each layer; ranks prepare their layers at the same time
OTHER_S, HOP_S, PROMPT = 1e-3, 40e-6, 10
BYTES_PER_VALUE = {"float16": 2.0, "int8": 1.0, "int4": 0.5}
FAMILIES = [Family(model, dtype, False) for model in SHAPES for dtype in BYTES_PER_VALUE]
MIB = 2**20


def values_of(model: str) -> int:
    """Weights of one layer."""
    return sum(rows * columns for rows, columns, _ in SHAPES[model].matrices)


def cache_bytes(model: str) -> float:
    """Keys and values of one token in one layer."""
    shape = SHAPES[model]
    return 2 * 2 * shape.hidden / shape.heads * shape.kv_heads


def pass_s(query: Query, tokens: int, context: float) -> float:
    """A pass of `tokens` of each sequence: the slower of reading and computing, and what no bytes explain."""
    model, values = query.family.model, values_of(query.family.model)
    read_s = values * BYTES_PER_VALUE[query.family.dtype] / BYTES_PER_S
    compute_s = 2 * values * query.batch * tokens / (FLOPS_PER_BYTE * BYTES_PER_S)
    cache_s = query.batch * context * cache_bytes(model) / BYTES_PER_S
    layer_s = LAUNCH_S + max(read_s, compute_s) + cache_s
    prepared_s = PREPARE_S * max(query.layers_per_stage)
    return query.layers * layer_s + prepared_s + OTHER_S + HOP_S * (query.pipeline_parallel - 1)


def measured(query: Query) -> Measurement:
    model, output = query.family.model, query.output_tokens
    context = PROMPT + output / 2
    latency_s = pass_s(query, PROMPT, 0.0) + (output - 1) * pass_s(query, 1, context)
    weights = values_of(model) * BYTES_PER_VALUE[query.family.dtype]
    kept = query.batch * (PROMPT + output) * cache_bytes(model)
    memory = query.layers * (weights + kept) + 500 * MIB * query.ranks
    return Measurement(query, latency_s, memory, 0)


@pytest.fixture(scope="module")
def estimator() -> Ostinato:
    plans = [(1, (1,)), (1, (2,)), (1, (1, 1)), (1, (2, 1))]
    return Ostinato(
        measured(Query(family, tp, stages, output, batch))
        for family, (tp, stages), output, batch in itertools.product(FAMILIES, plans, (10, 20), (1, 2))
    )


@pytest.mark.parametrize("family", FAMILIES, ids=str)
def test_deep_pipelines_wait_for_the_host_of_their_longest_stage(estimator: Ostinato, family: Family) -> None:
    for stages in ((32,), (16, 16), (8, 8, 8, 8), (4,) * 8, (3, 5, 8, 16)):
        truth = measured(Query(family, 1, stages, 100, 1))
        found = estimator.predict(truth.query).latency_s
        assert found.value == pytest.approx(truth.latency_s, rel=0.005), stages
        assert found.holds(truth.latency_s)


@pytest.mark.parametrize("family", [f for f in FAMILIES if f.dtype != "int8"], ids=str)
def test_no_batch_changes_the_time_that_bytes_do_not_explain(estimator: Ostinato, family: Family) -> None:
    """At batch 64 a layer of float16 is read longer than it is computed, of int4 half as long. (Both take the
    same time with int8, where our smooth maximum is 19% above the closed form.)"""
    truth = measured(Query(family, 1, (32,), 100, 64))
    assert estimator.predict(truth.query).latency_s.value == pytest.approx(truth.latency_s, rel=0.035)


def test_families_of_one_size_do_not_separate_it() -> None:
    """Without other sizes all of it could be reading: nothing is taken off pipelines."""
    alike = [family for family in FAMILIES if family.model in ("llama-2-7b", "gptj-6b")]
    rows = [
        measured(Query(family, 1, stages, output, 1))
        for family, stages, output in itertools.product(alike, [(1,), (2,), (1, 1)], (10, 20))
    ]
    assert Ostinato(rows).stages.prepared_s < PREPARE_S / 4
