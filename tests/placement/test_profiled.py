"""The estimates that decide about deployments are those of `ostinato estimate`."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from placement.solver.cluster import Cluster, Gpu, GpuType, Link, Node
from placement.solver.from_spec import figures_of
from placement.solver.plan import CandidatePlan, Shape, Stage
from placement.solver.policies.joint import Joint
from placement.solver.profiled import Knowledge, Measured, Profiled
from placement.solver.request import Request
from placement.solver.schema import read_scenario
from placement.solver.whatif import what_if
from profiler.predicting.predict import Ground, predict
from profiler.roofline import LINK_TO_MEMORY, VLLM_ON_GPU
from profiler.types import Basis, DeviceRates, Interval, Plan, Workload
from testkit.known_models import LLAMA_7B, LLAMA_7B_CONFIG
from testkit.simulated_profile import CALIBRATION, RATES
from testkit.solver_instances import GIB

FAST = RATES.memory_bytes_per_s * LINK_TO_MEMORY
GPU = GpuType("h200", RATES.memory_bytes_per_s, RATES.flops_per_s, kind="h200")
HALF = GpuType("half", RATES.memory_bytes_per_s / 2, RATES.flops_per_s / 2, kind="half")
CONTEXT, IN, OUT = 4096, 128, 64
TEMPLATE = Plan(1, (32,), "none", CONTEXT, 0, 4, 16, batched_tokens=8192)
NODE = Node("n", tuple(Gpu(i, "h200", 140 * GIB, 140 * GIB) for i in range(4)))
CLUSTER = Cluster((NODE,), (HALF, GPU), (FAST, FAST, FAST))
REQUEST = Request(
    "m", figures_of("m", LLAMA_7B), input_tokens=IN, output_tokens=OUT, concurrency=16, context=CONTEXT
)


def estimator(*measured: str) -> Profiled:
    profiles = {name: Measured(CALIBRATION, GPU.rates(1)) for name in measured}
    return Profiled(CLUSTER, REQUEST, Knowledge(LLAMA_7B, TEMPLATE, profiles))


def candidate(tp: int, split: tuple[int, ...], kind: str = "h200") -> CandidatePlan:
    shape = Shape(REQUEST.model.compressions[0], tp, len(split))
    return CandidatePlan(shape, tuple(Stage(n, kind) for n in split), (Link.FAST,) * (len(split) - 1))


@pytest.mark.parametrize("measured", [(), ("h200",)], ids=["rough", "profile"])
@pytest.mark.parametrize(("tp", "split"), [(1, (32,)), (2, (32,)), (1, (10, 22)), (2, (20, 12))], ids=str)
def test_at_rest_a_plan_is_estimated_as_it_is_predicted(
    measured: tuple[str, ...], tp: int, split: tuple[int, ...]
) -> None:
    asked, known = candidate(tp, split), estimator(*measured)
    figures, account = known(asked), known.account(asked)
    sized = replace(TEMPLATE, kv_cache_tokens=16 * CONTEXT, max_sequences=16)
    plan = replace(sized, tensor_parallel=tp, layers_per_stage=split)
    ground = Ground(LLAMA_7B, (RATES,) * plan.world_size, CALIBRATION if measured else None)
    found = predict(ground, plan, Workload(1, IN, OUT))
    assert account.plan == plan
    assert account.basis is (Basis.PROFILE if measured else Basis.ROUGH)
    assert figures.ttft_s == pytest.approx(found.ttft_s.value, rel=0.01)  # hops send bytes
    assert figures.tpot_s == pytest.approx(found.tpot_s.value, rel=0.01)
    assert account.tpot_share == pytest.approx(share(found.tpot_s))
    assert account.ttft_share == pytest.approx(share(found.ttft_s))
    for stage, layers in enumerate(split):
        cost = found.ranks[stage * tp]
        cache = 16 * CONTEXT * layers * 2 * 32 * 128 * 2 // tp
        assert figures.memory_bytes[stage] == pytest.approx(cost.total.value - cost.kv_cache + cache, abs=64)


def share(interval: Interval) -> tuple[float, float]:
    return interval.low / interval.value, interval.high / interval.value


def test_a_type_without_a_profile_is_scaled_from_one_that_has_it() -> None:
    known = estimator("h200")
    own, scaled = candidate(1, (32,)), candidate(1, (32,), "half")
    assert known(scaled).tpot_s == pytest.approx(2 * known(own).tpot_s)
    assert any("was not measured" in note for note in known.account(scaled).notes)
    mixed = CandidatePlan(candidate(1, (16, 16)).shape, (Stage(16, "h200"), Stage(16, "half")), (Link.FAST,))
    assert known.account(mixed).tpot_share == known.account(candidate(1, (16, 16), "half")).tpot_share


def test_a_slower_link_makes_all_reduces_slower() -> None:
    slow = replace(CLUSTER, link_bytes_per_s=(FAST, FAST / 10, FAST / 10))
    known = Profiled(slow, REQUEST, Knowledge(LLAMA_7B, TEMPLATE))
    shape = candidate(2, (32,)).shape
    fast, node = (known.rates(shape, "h200", link).prefill_layer_s for link in (Link.FAST, Link.NODE))
    sent = 2 * (2 - 1) / 2 * IN * 4096 * 2  # a ring of two, hidden states in bfloat16
    assert node - fast == pytest.approx(2 * sent * (10 / FAST - 1 / FAST))


@pytest.mark.parametrize("quantization", ["none", "fp8"])
def test_a_what_if_plan_with_a_config_is_estimated_like_a_deployment(
    tmp_path: Path, quantization: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_7B_CONFIG))
    document = {
        "cluster": {
            "types": {"x": {"memory_gb_per_s": 3500, "tflops": 600}},
            "nodes": [{"name": "a", "gpus": [{"type": "x", "total_gib": 140}]}],
        },
        "deployments": [
            {
                "name": "m",
                "model": {"config": ".", "compressions": {quantization: {"accuracy": 0.99}}},
                "input_tokens": IN,
                "output_tokens": OUT,
                "concurrency": 1,
            }
        ],
    }
    cluster, requests = read_scenario(document, tmp_path)
    ((_, placed),) = what_if(cluster, requests, Joint()).placed
    assert (placed.plan.quantization, placed.estimate.accuracy) == (quantization, 0.99)
    rates = DeviceRates(3500e9, 600e12)
    here = Ground(LLAMA_7B, (rates,), overheads=VLLM_ON_GPU)
    found = predict(here, placed.plan, Workload(1, IN, OUT))
    assert placed.estimate.tpot_s == pytest.approx(found.tpot_s.value)
    assert placed.estimate.ttft_s == pytest.approx(found.ttft_s.value)
    assert placed.estimate.memory_bytes[0] == pytest.approx(found.ranks[0].total.value, rel=1e-6)


def test_known_quantizations_need_no_sizes_in_a_what_if_plan(
    tmp_path: Path,
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_7B_CONFIG))
    given = {"bf16": {"accuracy": 1.0}, "fp8": {"accuracy": 0.9}, "int4": {"accuracy": 0.8, "share": 0.25}}
    nodes = [{"name": "a", "gpus": [{"type": "H200", "total_gib": 140}]}]
    for compressions in (given, {name: given[name] for name in ("bf16", "fp8")}):
        model = {"config": ".", "compressions": compressions}
        document = {"cluster": {"nodes": nodes}, "deployments": [{"name": "m", "model": model}]}
        _, (request,) = read_scenario(document, tmp_path)
        sizes = {one.name: one.layer_bytes for one in request.model.compressions}
        assert sizes["none"] == 2 * (4 * 4096**2 + 3 * 4096 * 11008 + 2 * 4096)
        assert 0.5 < sizes["fp8"] / sizes["none"] < 0.501
        assert (request.model.spec is None) == ("int4" in compressions)


def test_turns_that_the_profile_did_not_see_are_in_the_range() -> None:
    """At most 9 ms for each of two batches in flight; with one request after the other there are none."""
    unseen = Measured(replace(CALIBRATION, turn_s=0.0, turn_error=0.0, turn_most_s=9e-3), GPU.rates(1))
    known, asked = Knowledge(LLAMA_7B, TEMPLATE, {"h200": unseen}), candidate(1, (16, 16))
    for rate_per_s, is_wider in ((100.0, True), (0.0, False)):
        under = Profiled(CLUSTER, replace(REQUEST, rate_per_s=rate_per_s), known)
        high_s = under(asked).tpot_s * under.account(asked).tpot_share[1]
        assert (high_s > 1.99 * 9e-3) == is_wider
