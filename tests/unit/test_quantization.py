"""Forms of a model: their bytes by hand, who can have them, and estimates of those that were not measured."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from profiler.capabilities import compute_capability, gpu_problem
from profiler.errors import PlanError
from profiler.linears import Linear, Sharding
from profiler.measurements import Footprint, RankMemory, Setting, SyntheticVariant
from profiler.physical.calibration import Cut, CutTimes
from profiler.physical.curves import Line
from profiler.physical.variants import variant_load, work_s
from profiler.plans import candidate_plans, no_quantization_reason, quantization_names
from profiler.predicting.predict import check_plan, predict, predict_all
from profiler.profiling_plan import Reach, profiling_plan
from profiler.roofline import estimate, stage_weight_bytes
from profiler.shards import cut_problem, layer_moved_bytes, layer_shard_bytes
from profiler.types import Interval, ModelSpec, Plan, Workload
from profiler.variants.synthetic import synthetic_spec
from testkit.known_models import LLAMA_7B, SMOLLM2
from testkit.simulated_profile import CALIBRATION, OUT, RATES, ground, plan

ATTENTION, MLP = 4096 * 4096, 4096 * 11008  # of Llama-2-7B, in bfloat16
WHOLE = (4 * ATTENTION + 3 * MLP) * 2 + 2 * 4096 * 2


@pytest.mark.parametrize(
    ("gpu", "capability"),
    [
        # Names as in data sheets and as the driver says them; NVIDIA's own list of compute capabilities.
        ("A100-80GB", (8, 0)),
        ("NVIDIA A100-SXM4-40GB", (8, 0)),
        ("nvidia-a100-sxm4-80gb", (8, 0)),
        ("A10", (8, 6)),
        ("NVIDIA A10G", (8, 6)),
        ("A6000", (8, 6)),
        ("NVIDIA RTX A6000", (8, 6)),
        ("NVIDIA RTX 6000 Ada Generation", (8, 9)),
        ("Quadro RTX 6000", (7, 5)),
        ("NVIDIA GeForce RTX 3080 Ti", (8, 6)),
        ("NVIDIA GeForce RTX 4090", (8, 9)),
        ("L4", (8, 9)),
        ("NVIDIA L40S", (8, 9)),
        ("Tesla T4", (7, 5)),
        ("Tesla V100-SXM2-16GB", (7, 0)),
        ("NVIDIA H100 80GB HBM3", (9, 0)),
        ("NVIDIA H200", (9, 0)),
        ("NVIDIA B200", (10, 0)),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", (12, 0)),
        ("AMD A10-7850K Radeon R7", None),
        ("mine", None),
        ("", None),
    ],
)
def test_a_gpu_is_known_by_its_name(gpu: str, capability: tuple[int, int] | None) -> None:
    assert compute_capability(gpu) == capability
    fp8 = capability is None or capability >= (8, 9)
    assert (gpu_problem("fp8", gpu) is None) == fp8
    assert gpu_problem("none", gpu) is None
    assert quantization_names({"fp8": 98.0, "none": 99.0}, LLAMA_7B, gpu) == ("none", "fp8")[: 1 + fp8]


def test_a_model_in_fp8_alone_is_refused_by_a_gpu_without_it() -> None:
    said = no_quantization_reason({"fp8": 98.0}, LLAMA_7B, "NVIDIA A100-SXM4-80GB")
    assert "fp8 needs GPUs of compute capability 8.9 or higher, but NVIDIA A100-SXM4-80GB has 8.0" in said
    with pytest.raises(PlanError, match=r"compute capability 8\.9"):
        check_plan(LLAMA_7B, plan(quantization="fp8"), "A100-80GB")


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_a_layer_in_fp8_has_a_byte_for_each_weight_and_a_scale_for_each_output(tp: int) -> None:
    weights = (4 * ATTENTION + 3 * MLP) // tp
    scales = 4 * (3 * 4096 // tp + 4096 + 2 * 11008 // tp + 4096)  # o and down keep all their outputs
    assert layer_shard_bytes(LLAMA_7B, tp, "fp8") == weights + scales + 2 * 4096 * 2
    assert layer_shard_bytes(LLAMA_7B, 1) == layer_shard_bytes(LLAMA_7B, 1, "int4_of_somebody") == WHOLE


def test_biases_stay_as_they_are_and_only_experts_that_are_hit_are_read() -> None:
    experts = Linear(64, 32, Sharding.COLUMN, bias=True, experts=8, active=2)
    spec = replace(LLAMA_7B, linears={"up": experts}, layer_weight_bytes=8 * (64 * 32 + 64) * 2)
    each = 64 * 32 + 64 * 4 + 64 * 2
    assert layer_shard_bytes(spec, 1, "fp8") == 8 * each
    assert layer_moved_bytes(spec, 1, 1, "fp8") == pytest.approx(2 * each)


def test_routers_are_not_quantized() -> None:
    """A Mixtral with 8 experts, whose router's 8 outputs are no multiple of 16."""
    router = Linear(8, 4096, Sharding.REPLICATED)
    spec = replace(LLAMA_7B, linears={"gate": router}, layer_weight_bytes=8 * 4096 * 2)
    assert layer_shard_bytes(spec, 2, "fp8") == layer_shard_bytes(spec, 2)
    assert cut_problem(spec, 2, "fp8") is None


def test_variants_are_read_at_the_pace_of_the_base_whatever_its_quantization() -> None:
    """A layer in fp8 that takes its share of the bytes' time is read just as fast."""
    share = layer_shard_bytes(LLAMA_7B, 1, "fp8") / WHOLE
    plain = CALIBRATION.times[Cut(1)]
    known = replace(CALIBRATION, times={**CALIBRATION.times, Cut(1, "fp8"): scaled(plain, share)})
    lora = synthetic_spec(LLAMA_7B, SyntheticVariant("lora", rank=16))
    (load,) = variant_load(LLAMA_7B, [lora], 1).kinds
    reads = [work_s(known, cut, load, 1)[0] for cut in (Cut(1), Cut(1, "fp8"))]
    assert reads[0] == pytest.approx(reads[1])


def _width(interval: Interval) -> float:
    return interval.high / interval.low - 1


def scaled(times: CutTimes, factor: float) -> CutTimes:
    def longer(line: Line) -> Line:
        return replace(line, ys=tuple(y * factor for y in line.ys))

    step = times.decode
    rest, layer = longer(step.rest), longer(step.layer)
    return replace(times, decode=replace(step, rest=rest, layer=layer, pair_s=step.pair_s * factor))


def test_embedding_and_head_are_not_quantized() -> None:
    quantized, whole = (stage_weight_bytes(LLAMA_7B, plan(quantization=q), 0) for q in ("fp8", "none"))
    assert whole - quantized + 32 * 2**20 == 32 * (WHOLE - layer_shard_bytes(LLAMA_7B, 1, "fp8"))


def test_a_model_has_the_quantizations_it_is_registered_for_in_engines_of_two_bytes() -> None:
    in_float32 = replace(LLAMA_7B, dtype_bytes=4)
    assert quantization_names({"fp8": 98.0, "bf16": 99.0, "int4": 90.0}, LLAMA_7B) == ("none", "fp8")
    assert quantization_names({"fp8": 98.0}, LLAMA_7B) == ("fp8",)
    assert (
        quantization_names({}, LLAMA_7B)
        == quantization_names({"fp8": 98.0, "none": 99.0}, in_float32)
        == ("none",)
    )
    assert quantization_names({"fp8": 98.0}, in_float32) == ()
    assert "(OSTINATO_ENGINE_DTYPE)" in no_quantization_reason({"fp8": 98.0, "int4": 90.0}, in_float32)
    assert "needs engines with" not in no_quantization_reason({"int4": 90.0}, in_float32)
    assert "register the model with one of" in no_quantization_reason({"int4": 90.0}, in_float32)


def test_rows_and_columns_of_a_rank_are_multiples_of_16() -> None:
    """SmolLM2's 192 keys are 64 on each of three ranks; 11008 features of Llama-2-7B are 344 on 32."""
    assert cut_problem(SMOLLM2, 3, "fp8") is None
    assert cut_problem(LLAMA_7B, 32, "none") is None
    assert "multiples of 16, but gate_proj is 344 x 4096" in str(cut_problem(LLAMA_7B, 32, "fp8"))
    assert "heads" in str(cut_problem(LLAMA_7B, 3, "fp8"))
    found = candidate_plans(LLAMA_7B, ("none", "fp8"), 32, 128, 1, 0, 0)
    widths = {
        quantization: {p.tensor_parallel for p in found if p.quantization == quantization}
        for quantization in ("none", "fp8")
    }
    assert widths == {"none": {1, 2, 4, 8, 16, 32}, "fp8": {1, 2, 4, 8, 16}}


def test_only_the_bytes_read_count_for_a_token_of_one_request() -> None:
    """The roofline with a context so short that it is negligible next to the weights."""
    load = Workload(1, 1, 1)
    quantized, whole = (
        estimate(LLAMA_7B, plan(quantization=q), [RATES], load, 1.0).tpot_s for q in ("fp8", "none")
    )
    head = 32000 * 4096 * 2
    read = (32 * layer_shard_bytes(LLAMA_7B, 1, "fp8") + head) / (32 * WHOLE + head)
    assert quantized / whole == pytest.approx(read, rel=0.01)


def test_an_unmeasured_quantization_is_scaled_with_a_wider_range_and_marked_so() -> None:
    load = Workload(1, 128, OUT)
    quantized, whole = (predict(ground(plan()), plan(quantization=q), load) for q in ("fp8", "bf16"))
    assert quantized.tpot_s.value < 0.7 * whole.tpot_s.value
    assert _width(quantized.tpot_s) > 1.5 * _width(whole.tpot_s)
    assert any("fp8 was not measured" in note for note in quantized.notes)
    assert not any("not measured; scaled" in note for note in whole.notes)
    assert quantized.ranks[0].weights == stage_weight_bytes(LLAMA_7B, plan(quantization="fp8"), 0)
    assert quantized.ranks[0].runtime == whole.ranks[0].runtime  # what is not weights differs little
    assert quantized.ranks[0].total.value < whole.ranks[0].total.value


def test_a_quantization_that_was_measured_takes_and_holds_what_was_measured() -> None:
    """Twice as long for each layer, and two thirds of its bytes."""
    slow = CALIBRATION.times[Cut(1)]
    times = {**CALIBRATION.times, Cut(1, "fp8"): scaled(slow, 2.0)}
    held = 32 * WHOLE * 2 // 3 + 2 * 32000 * 4096 * 2 + 4096 * 2
    memory = RankMemory(held, 0, 0, 500 << 20, 0, 0)
    footprint = Footprint(Setting((32,), quantization="fp8", batched_tokens=8192), (memory,), 1.0)
    known = replace(CALIBRATION, times=times, footprints=(*CALIBRATION.footprints, footprint))
    here, load = replace(ground(plan()), calibration=known), Workload(4, 128, OUT)
    quantized, whole = predict_all(here, [plan(quantization=q) for q in ("fp8", "none")], load)
    assert quantized.tpot_s.value == pytest.approx(2 * whole.tpot_s.value)
    assert quantized.ttft_s.value == pytest.approx(whole.ttft_s.value)
    assert quantized.ranks[0].weights == pytest.approx(held, rel=1e-6)
    assert not quantized.notes


@given(st.sampled_from(["fp8", "none", "fp16"]), st.sampled_from([1, 2, 4]), st.integers(1, 31))
def test_plans_together_are_predicted_as_each_alone(quantization: str, tp: int, first: int) -> None:
    wanted, load = plan(tp, (first, 32 - first), quantization=quantization), Workload(2, 64, OUT)
    others = [plan(tp, (first, 32 - first), quantization=other) for other in ("none", "fp8")]
    for known in (True, False):
        together = predict_all(ground(plan(), known), [*others, wanted], load)[-1]
        assert together == predict(ground(wanted, known), wanted, load)


@pytest.mark.parametrize(
    ("changes", "spec", "said"),
    [
        ({"quantization": "int3"}, LLAMA_7B, "expected one of bf16, float32, fp16, fp8, none, got 'int3'"),
        ({"quantization": "fp8"}, replace(LLAMA_7B, dtype_bytes=4), "OSTINATO_ENGINE_DTYPE"),
    ],
)
def test_forms_that_cannot_be_are_refused(changes: dict[str, Any], spec: ModelSpec, said: str) -> None:
    here = replace(ground(plan()), spec=spec, calibration=None)
    for ask in (predict, lambda here, p, load: predict_all(here, [p], load)):
        with pytest.raises(PlanError, match=said) as caught:
            ask(here, plan(**changes), Workload(1, 1, 1))
        assert caught.value.field == "quantization"


def test_a_profile_measures_the_quantizations_that_are_asked_for_after_everything_else() -> None:
    cpu, gpus = Reach(True, 1, 64 << 30, 2048, 16, 2048), Reach(False, 4, 100 << 30, 2048, 64, 8192)
    for reach, degrees in ((cpu, [1]), (gpus, [1, 2, 4])):
        plain, more = (
            profiling_plan(LLAMA_7B, reach),
            profiling_plan(LLAMA_7B, replace(reach, quantizations=("fp8",))),
        )
        assert more[: len(plain)] == plain
        added = [run.setting for run in more[len(plain) :]]
        assert [s.tensor_parallel for s in added] == degrees
        assert {(s.quantization, s.layers_per_stage) for s in added} == {("fp8", (32,))}
        whole = [
            run
            for run in plain
            if run.setting.layers_per_stage == (32,) and (run.variants == () or reach.on_cpu)
        ]
        alike = {run.setting.tensor_parallel: run.points for run in whole}
        assert all(t.points == alike[t.setting.tensor_parallel] or reach.on_cpu for t in more[len(plain) :])
    narrow = replace(SMOLLM2, linear_shapes={**SMOLLM2.linear_shapes, "gate_proj": (1000, 576)})
    assert len(profiling_plan(narrow, replace(cpu, quantizations=("fp8",)))) == 1


def test_the_plan_of_an_alias_is_the_uncompressed_one() -> None:
    load = Workload(1, 16, 16)
    one, other = (
        estimate(SMOLLM2, Plan(1, (30,), q, 128, 128, 0, 0), [RATES], load, 1.0) for q in ("none", "bf16")
    )
    assert one == other
