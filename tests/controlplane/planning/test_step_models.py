"""Step models from the records: held to the predictor on grounds of the test's own, and to their content."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controlplane.planning import step_models as module
from controlplane.planning.step_models import Memo, StepModels, step_models
from controlplane.profiling.keys import key_on
from controlplane.settings import Settings
from controlplane.state.records import Deployment, Model, ModelProfile, Phase
from controlplane.state.repository import State
from controlplane.state.worker_groups import GroupPhase, WorkerGroup
from placement.types import Device, Intent, Inventory, Placement, Plan, RankPlacement
from profiler.compiled import Records, records
from profiler.measurements import SyntheticVariant, to_line
from profiler.predicting.predict import Ground, predict
from profiler.step_time import sampling, steps
from profiler.step_time.records import BATCH
from profiler.types import CPU, DeviceRates, Estimate, Workload
from profiler.variants.synthetic import synthetic_spec
from testkit.controlplane import builders
from testkit.known_models import LLAMA_7B
from testkit.simulated_profile import BUDGET, CALIBRATION, RATES, measurements, plan

SETTINGS = Settings(engine="vllm")
GPUS = tuple(Device("n", i, "H200", 1 << 37, 1 << 36, RATES, "H200", "0.32.0") for i in range(4))
SLOW = replace(GPUS[0], node="m", model="A6000", kind="A6000", rates=DeviceRates(7e11, 150e12))
INVENTORY = Inventory((*GPUS, SLOW))
BASE = Model("b", 1, Phase.READY, source="/m", path="/m", spec=LLAMA_7B)
LINES = tuple(map(to_line, measurements()))


def profile() -> ModelProfile:
    key = key_on(BASE, GPUS[0], SETTINGS)
    assert key is not None
    return ModelProfile(key.text, "llama", key.dtype, "H200", "0.32.0", Phase.READY, LINES)


def placed(p: Plan, *devices: Device) -> Placement:
    ranks: list[RankPlacement] = []
    layer = 0
    for stage, layers in enumerate(p.layers_per_stage):
        for tp_rank in range(p.tensor_parallel):
            number = len(ranks)
            device = devices[number]
            at = device.node, device.index, device.kind
            ranks.append(RankPlacement(number, stage, tp_rank, *at, layer, layer + layers, 1 << 34))
        layer += layers
    return Placement(p, tuple(ranks), Estimate(1.0, 1.0, (1,), 100.0), "it fits")


def group(number: int, placement: Placement | None, phase: GroupPhase = GroupPhase.SERVING) -> WorkerGroup:
    return WorkerGroup(number, phase, placement)


def lora(name: str, uid: int, rank: int) -> Model:
    spec = synthetic_spec(LLAMA_7B, SyntheticVariant("lora", rank=rank))
    return Model(name, uid, Phase.READY, base="b", adapter="/a", path="/a", variant_spec=spec)


ONE = plan(max_variants=8, max_lora_rank=64, max_sequences=48)
VARIANTS = [lora("v", 70, 16), lora("w", 30, 64)]


def state_of(*groups: WorkerGroup, others: list[Any] | None = None, known: bool = True) -> State:
    deployment = Deployment("b", 1, "b", Phase.DEPLOYED, Intent.MIN_COST, 16, groups=groups)
    more = VARIANTS if others is None else others
    return builders.state(BASE, deployment, *more, *([profile()] if known else []))


def models_of(state: State, inventory: Inventory = INVENTORY, memo: Memo | None = None) -> StepModels:
    found = step_models(state, inventory, SETTINGS, "b", memo)
    assert found is not None
    return found


def ground(p: Plan, rates: DeviceRates = RATES, known: bool = True, **more: Any) -> Ground:
    """Written out here: what is known of Llama-2-7B in bfloat16 on these devices."""
    calibration = CALIBRATION if known else None
    return Ground(LLAMA_7B, (rates,) * p.world_size, calibration, launched=("lora",), **more)


def batch(rows: Records, chosen: list[int], context: float) -> Records:
    made = records(BATCH, 1)
    for number, variant in enumerate(chosen):
        steps.add(made[0], rows[variant], context, variant not in chosen[:number])
    return made[0]


TWO = plan(2, max_variants=8, max_lora_rank=64, max_sequences=48)
FOUND = models_of(state_of(group(0, placed(ONE, GPUS[0])), group(1, placed(TWO, *GPUS[1:3]))))


@settings(deadline=None, max_examples=40)
@given(st.sampled_from([("b", ONE), ("b@1", TWO)]), st.integers(1, 256), st.integers(16, 1000))
def test_decoding_takes_the_predicted_time(of: tuple[str, Plan], rows: int, tokens: int) -> None:
    group_id, p = of
    model = FOUND.models[FOUND.model_of_group[group_id]]
    expected = predict(ground(p), p, Workload(rows, tokens, 64)).step_s.value
    found = steps.decode_step_s(model, batch(FOUND.variants[0], [0] * rows, tokens + 32))
    assert found == pytest.approx(expected, rel=0.03)


@settings(deadline=None, max_examples=20)
@given(st.lists(st.sampled_from([0, 70, 30]), min_size=1, max_size=40))
def test_a_mix_takes_the_predicted_time(uids: list[int]) -> None:
    specs = {0: None, 70: VARIANTS[0].variant_spec, 30: VARIANTS[1].variant_spec}
    number, rows = FOUND.model_of_group["b"], {0: 0, **FOUND.variant_rows}
    mix = [specs[uid] for uid in uids]
    expected = predict(ground(ONE), ONE, Workload(len(uids), 100, 20), mix).step_s.value
    made = batch(FOUND.variants[number], [rows[uid] for uid in uids], 110)
    assert steps.decode_step_s(FOUND.models[number], made) == pytest.approx(expected, rel=0.03)


@pytest.mark.parametrize("tokens", [20, 700, 2048])
def test_a_prompt_takes_the_predicted_time(tokens: int) -> None:
    expected = predict(ground(TWO), TWO, Workload(1, tokens, 2)).ttft_s.value
    model = FOUND.models[FOUND.model_of_group["b@1"]]
    assert steps.prefill_curve_s(model, float(tokens)) == pytest.approx(expected, rel=0.03)


def test_an_engine_s_sizes_come_from_its_configuration() -> None:
    model = FOUND.models[FOUND.model_of_group["b"]]
    assert (model.max_rows, model.slots, model.kv_tokens) == (48, 8, ONE.kv_cache_tokens)
    assert model.batched_tokens == BUDGET


def test_variants_have_rows_by_their_uid_and_take_their_bytes_to_load() -> None:
    assert FOUND.variant_rows == {30: 1, 70: 2}
    assert FOUND.variants.shape == (2, 3)
    for group_id, ranks in (("b", 1), ("b@1", 2)):
        own = FOUND.variants[FOUND.model_of_group[group_id]]
        for variant in VARIANTS:
            spec, row = variant.variant_spec, own[FOUND.variant_rows[variant.uid]]
            assert spec is not None
            assert (row.rank, row.bytes) == (spec.max_rank, spec.weight_bytes)
            assert row.load_s == pytest.approx(spec.weight_bytes / module.GPU_LOAD_BYTES_PER_S / ranks)
            assert row.fetch_s == pytest.approx(spec.weight_bytes / module.FETCH_BYTES_PER_S)
        assert own[0].kind == -1


def test_groups_that_are_alike_share_a_model() -> None:
    alike = [group(n, placed(ONE, GPUS[n])) for n in range(3)]
    found = models_of(state_of(*alike, group(3, placed(plan(max_variants=4), GPUS[3]))))
    assert len(found.models) == 2
    assert found.model_of_group == {"b": 0, "b@1": 0, "b@2": 0, "b@3": 1}


def test_only_groups_that_serve_on_known_devices_have_a_step_model() -> None:
    gone = replace(GPUS[1], node="gone")
    groups = [
        group(0, placed(ONE, GPUS[0])),
        group(1, placed(ONE, gone)),
        group(2, placed(ONE, GPUS[2]), GroupPhase.STARTING),
        group(3, None),
        group(4, placed(plan(layers=(31,)), GPUS[3])),  # not the model's layers
    ]
    assert models_of(state_of(*groups)).model_of_group == {"b": 0}
    assert step_models(state_of(*groups[1:]), INVENTORY, SETTINGS, "b") is None
    assert step_models(state_of(*groups), INVENTORY, SETTINGS, "another") is None


def test_a_step_model_without_a_profile_is_rough() -> None:
    found = models_of(state_of(group(0, placed(TWO, *GPUS[:2])), others=[], known=False))
    expected = predict(ground(TWO, known=False), TWO, Workload(8, 512, 2)).step_s.value
    made = batch(found.variants[0], [0] * 8, 513)
    assert steps.decode_step_s(found.models[0], made) == pytest.approx(expected, rel=0.03)


def test_an_unmeasured_device_is_scaled_from_the_measured() -> None:
    found = models_of(state_of(group(0, placed(ONE, SLOW)), others=[]))
    here = ground(ONE, SLOW.rates, measured=RATES)
    expected = predict(here, ONE, Workload(8, 512, 2)).step_s.value
    assert expected > 2 * predict(ground(ONE), ONE, Workload(8, 512, 2)).step_s.value
    made = batch(found.variants[0], [0] * 8, 513)
    assert steps.decode_step_s(found.models[0], made) == pytest.approx(expected, rel=0.03)


def test_ranks_on_a_cpu_share_it() -> None:
    host = Device("n", 0, CPU, 1 << 37, 1 << 36, DeviceRates(20e9, 100e9), "a CPU x8", "0.32.0")
    one = group(0, placed(TWO, host, host))
    found = models_of(state_of(one, others=VARIANTS[:1], known=False), Inventory((host,)))
    whole = replace(
        LLAMA_7B,
        dtype_bytes=4,
        layer_weight_bytes=2 * LLAMA_7B.layer_weight_bytes,
        other_weight_bytes=2 * LLAMA_7B.other_weight_bytes,
    )
    half = Ground(whole, (DeviceRates(10e9, 50e9),) * 2, shared=2)
    expected = predict(half, TWO, Workload(4, 16, 2)).step_s.value
    made = batch(found.variants[0], [0] * 4, 17)
    assert steps.decode_step_s(found.models[0], made) == pytest.approx(expected, rel=0.01)
    assert found.variants[0, 1].load_s == pytest.approx(found.variants[0, 1].bytes / 10e9)


# --- what is computed again ----------------------------------------------------------------------


class Counted:
    """The number of times that models and variants are sampled."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.models = self.variants = 0
        model, part = sampling.step_model, sampling.sampled_part

        def count_model(*args: Any) -> Any:
            self.models += 1
            return model(*args)

        def count_part(*args: Any) -> Any:
            self.variants += 1
            return part(*args)

        monkeypatch.setattr(module, "step_model", count_model)
        monkeypatch.setattr(module, "sampled_part", count_part)


def test_a_variant_more_costs_its_own_sampling_only(monkeypatch: pytest.MonkeyPatch) -> None:
    counted, pauses = Counted(monkeypatch), []
    memo = Memo(lambda: pauses.append(1))
    one = group(0, placed(ONE, GPUS[0]))
    models_of(state_of(one), memo=memo)
    assert (counted.models, counted.variants) == (1, 2)
    more = [*VARIANTS, lora("x", 90, 8)]
    found = models_of(state_of(one, others=more), memo=memo)
    assert (counted.models, counted.variants) == (1, 3)
    assert len(pauses) == 1 + 3 + 1  # a calibration, too
    assert found.is_same(models_of(state_of(one, others=more)))
    models_of(state_of(one, others=more), memo=memo)
    assert (counted.models, counted.variants) == (2, 6)  # of the one without a memo


def test_variants_that_are_alike_are_sampled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    counted = Counted(monkeypatch)
    many = [lora(f"v{n}", 100 + n, 16) for n in range(50)]
    found = models_of(state_of(group(0, placed(ONE, GPUS[0])), others=many))
    assert counted.variants == 1
    assert found.variants.shape == (1, 51)
    assert len({row.tobytes() for row in found.variants[0, 1:]}) == 1


def test_only_changed_models_are_computed_again() -> None:
    memo = Memo()
    one = group(0, placed(ONE, GPUS[0]))
    before = models_of(state_of(one), memo=memo)
    quicker = tuple(
        replace(d, rates=DeviceRates(2 * RATES.memory_bytes_per_s, RATES.flops_per_s)) for d in GPUS
    )
    for state, inventory in (
        (state_of(one, known=False), INVENTORY),
        (state_of(one, known=False), Inventory(quicker)),
        (state_of(one, others=[]), INVENTORY),
        (state_of(group(0, placed(TWO, *GPUS[:2]))), INVENTORY),
    ):
        found = models_of(state, inventory, memo)
        assert not found.is_same(before)
        assert found.is_same(models_of(state, inventory))
        before = found


def test_a_memo_forgets_what_is_not_asked_for() -> None:
    memo = Memo()
    for n in range(20):
        models_of(state_of(group(0, placed(ONE, GPUS[0])), others=[lora("v", 100 + n, 1 + n)]), memo=memo)
    assert len(memo._now) + len(memo._before) == 3


def test_step_models_are_a_function_of_their_arguments() -> None:
    one = group(0, placed(ONE, GPUS[0]))
    first, again = models_of(state_of(one)), models_of(state_of(one, others=VARIANTS[::-1]))
    assert first.is_same(again)
    assert np.isfinite(first.models.decode_s).all()
