"""Which fine-tune is compressed next and where, and what its measured accuracy means: pure."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from controlplane import errors
from controlplane.cluster import reservations
from controlplane.planning import accuracy, compressing
from controlplane.planning.compressing import CompressJob, Queued
from controlplane.settings import Settings
from controlplane.state import deltas
from controlplane.state.deltas import Artifact, Delta, Recipe
from controlplane.state.records import Model, NodeLedger, Phase, Reservation
from controlplane.state.terms import GroupPhase
from placement.types import Device, Inventory
from profiler.types import DeviceRates
from testkit.controlplane.builders import PLACED, deployment, ready_base, state
from workers.compression.lines import Progress, Quality, TaskLoss

GIB = 1 << 30
RATES = DeviceRates(1e10, 1e11)
CPU = Device("node", 0, "cpu", 16 * GIB, 16 * GIB, RATES)
OTHER = replace(CPU, node="other")
GPU = Device("node", 1, "cuda", 80 * GIB, 80 * GIB, RATES)
ARTIFACT = Artifact("deltacompress", "sparse_delta", 10, 100)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Model:
    from testkit import checkpoints

    root = tmp_path_factory.mktemp("compressing")
    checkpoints.write_model(root / "base")
    return replace(ready_base(root), name="b")


def tuned(name: str, created_at_s: float = 0.0, uid: int = 7, **recipe: Any) -> Model:
    delta = Delta(Recipe("magnitude", **recipe), tuned=f"/m/{name}")
    return Model(
        name,
        uid,
        Phase.COMPRESSING,
        source=f"/m/{name}",
        base="b",
        created_at_s=created_at_s,
        delta=delta,
    )


def ledger(*holders: str, device: Device = CPU, memory_bytes: int = GIB) -> NodeLedger:
    promised = (Reservation(h, 7, 0, device.kind, device.index, memory_bytes, 0.0) for h in holders)
    return NodeLedger(device.node, tuple(promised))


def decide(
    settings: Settings, name: str, *records: Any, devices: tuple[Device, ...] = (CPU,)
) -> CompressJob | Queued:
    return compressing.next_job(state(*records), name, Inventory(devices), settings)


def begun(decision: CompressJob | Queued) -> CompressJob:
    assert isinstance(decision, CompressJob), decision
    return decision


def reason(decision: CompressJob | Queued) -> str:
    assert isinstance(decision, Queued), decision
    return decision.reason


def test_a_compression_begins_where_memory_is_free(settings: Settings, base: Model) -> None:
    job = begun(decide(settings, "v", base, tuned("v")))
    assert (job.node, job.request.device, job.request.gpus) == ("node", "cpu", ())
    assert job.request.folder == settings.artifacts_folder / "v-7"
    assert (job.request.base, job.request.tuned) == (Path(base.path or ""), Path("/m/v"))
    assert job.request.holder == "compressing:v"


def test_one_at_a_time_on_a_node(monkeypatch: pytest.MonkeyPatch, settings: Settings, base: Model) -> None:
    running = ledger("compressing:u")
    assert "its turn" in reason(decide(settings, "v", base, tuned("u"), tuned("v"), running))
    both = decide(settings, "v", base, tuned("u"), tuned("v"), running, devices=(CPU, OTHER))
    assert begun(both).node == "other"
    monkeypatch.setattr(compressing, "PER_NODE", 2)
    assert begun(decide(settings, "v", base, tuned("u"), tuned("v"), running)).node == "node"


def test_the_oldest_goes_first(settings: Settings, base: Model) -> None:
    records = (base, tuned("old", 1.0), tuned("new", 2.0))
    assert "'old'" in reason(decide(settings, "new", *records))
    begun(decide(settings, "old", *records))


BUSY = ledger("b", device=GPU, memory_bytes=79 * GIB)


def test_a_job_that_waits_for_a_gpu_blocks_no_job_for_a_cpu(settings: Settings, base: Model) -> None:
    old = tuned("old", 1.0, device="gpu")
    for device in ("cpu", "auto"):
        new = tuned("new", 2.0, device=device)
        assert (
            begun(decide(settings, "new", base, old, new, BUSY, devices=(CPU, GPU))).request.device == "cpu"
        )
    new = tuned("new", 2.0, device="gpu")
    small = replace(BUSY.reservations[0], memory_bytes=GIB)
    turn = decide(settings, "new", base, old, new, NodeLedger("node", (small,)), devices=(CPU, GPU))
    assert "'old'" in reason(turn)


def test_memory_that_engines_have_is_waited_for_without_holding_up_others(
    monkeypatch: pytest.MonkeyPatch, settings: Settings, base: Model
) -> None:
    """The end of a measurement is unknown. A compression does end: its memory is kept for the first in the
    line."""
    assert base.spec is not None
    spec = replace(base.spec, hidden_size=4096, max_position=1 << 20)
    many = replace(base, spec=spec)
    needed = compressing.needed_bytes(spec, Recipe("magnitude", rows=512, tokens=1 << 10))
    assert 15 * GIB < needed < 25 * GIB
    old, new = tuned("old", 1.0, rows=512, tokens=1 << 10), tuned("new", 2.0, rows=1, tokens=8)
    room, device = ledger("b", memory_bytes=30 * GIB), replace(CPU, total_bytes=40 * GIB, free_bytes=40 * GIB)
    engine = decide(settings, "new", many, old, new, room, devices=(device,))
    assert begun(engine).request.holder == "compressing:new"
    other = ledger("compressing:u", memory_bytes=30 * GIB)
    monkeypatch.setattr(compressing, "PER_NODE", 2)
    held = decide(settings, "new", many, old, new, tuned("u"), other, devices=(device,))
    assert "'old'" in reason(held)


def test_calibration_takes_what_its_texts_and_the_models_positions_can_give(base: Model) -> None:
    assert base.spec is not None
    absurd = Recipe("deltacompress", rows=100_000, tokens=1 << 20)
    assert compressing.calibration_tokens(base.spec, absurd, None) == 100_000 * base.spec.max_position
    assert compressing.calibration_tokens(base.spec, absurd, 25_000) == 25_000
    few = Recipe("deltacompress", rows=2, tokens=8)
    assert compressing.calibration_tokens(base.spec, few, 25_000) == 16
    difference = compressing.needed_bytes(base.spec, absurd, 25_000) - compressing.needed_bytes(
        base.spec, few, 25_000
    )
    assert difference == 2 * (25_000 - 16) * base.spec.hidden_size * 4


def test_a_gpu_that_an_older_one_waits_for_is_not_taken(
    monkeypatch: pytest.MonkeyPatch, settings: Settings, base: Model
) -> None:
    """Two are compressed on a node at once, and there is room: for the older one, a moment later."""
    monkeypatch.setattr(compressing, "PER_NODE", 2)
    old, new = tuned("old", 1.0, device="gpu"), tuned("new", 2.0)
    measuring = ledger("measuring:key", device=GPU)
    assert begun(decide(settings, "new", base, old, new, measuring, devices=(OTHER, GPU))).node == "other"


def test_a_turn_goes_to_the_older_one_even_of_another_device(settings: Settings, base: Model) -> None:
    """Otherwise jobs for CPUs, one after the other, would keep a node from a job that waits for its GPU."""
    old, new = tuned("old", 1.0, device="gpu"), tuned("new", 2.0, device="cpu")
    assert "'old'" in reason(decide(settings, "new", base, old, new, devices=(CPU, GPU)))
    assert begun(decide(settings, "new", base, old, new, devices=(CPU, OTHER, GPU))).node == "other"


def test_a_younger_job_delays_no_older_job(settings: Settings, base: Model) -> None:
    """A model that was begun before a crash of the controller has its reservation, and waits for no other
    model."""
    records = (base, tuned("old", 1.0), tuned("new", 2.0), ledger("compressing:old"))
    begun(decide(settings, "old", *records))


def test_a_gpu_on_which_nothing_is_goes_before_a_cpu(settings: Settings, base: Model) -> None:
    job = begun(decide(settings, "v", base, tuned("v"), devices=(CPU, GPU)))
    assert (job.request.device, job.request.gpus, job.device) == ("cuda", (1,), ("node", "cuda", 1))
    engine = ledger("b", device=GPU)
    job = begun(decide(settings, "v", base, tuned("v"), engine, devices=(CPU, GPU)))
    assert job.request.device == "cpu"
    asked = begun(decide(settings, "v", base, tuned("v", device="gpu"), engine, devices=(CPU, GPU)))
    assert asked.request.device == "cuda", "who asks for one shares it"
    kept = begun(decide(settings, "v", base, tuned("v", device="cpu"), devices=(CPU, GPU)))
    assert kept.request.device == "cpu"


def test_a_gpu_that_is_not_there_is_no_wait(settings: Settings, base: Model) -> None:
    with pytest.raises(errors.CompressionFailed, match="the cluster has no device"):
        decide(settings, "v", base, tuned("v", device="gpu"))


def test_a_compression_waits_for_memory_and_for_measurements(settings: Settings, base: Model) -> None:
    full = ledger("b", memory_bytes=15 * GIB + GIB // 2)
    assert "GiB of free memory" in reason(decide(settings, "v", base, tuned("v"), full))
    measuring = ledger("measuring:key")
    assert "measured" in reason(decide(settings, "v", base, tuned("v"), measuring))


def test_a_job_s_own_reservation_is_no_obstacle(settings: Settings, base: Model) -> None:
    """After a crash of the controller its reservation stands."""
    mine = ledger("compressing:v", memory_bytes=15 * GIB)
    assert begun(decide(settings, "v", base, tuned("v"), mine)).node == "node"


def test_a_compression_ends_after_attempts_without_progress(settings: Settings, base: Model) -> None:
    model = tuned("v")
    delta = compressing.require_delta(model)
    for _ in range(compressing.MAX_ATTEMPTS):
        begun(decide(settings, "v", base, replace(model, delta=delta)))
        delta = deltas.queued(deltas.placed(delta, "node"), "signal SIGKILL")
    with pytest.raises(errors.CompressionFailed, match="SIGKILL"):
        decide(settings, "v", base, replace(model, delta=delta))
    further = deltas.at(delta, Progress(0.5, "layer 1 of 2"))
    begun(decide(settings, "v", base, replace(model, delta=further)))
    again = deltas.at(deltas.placed(further, "node"), Progress(0.2, "layer 0 of 2"))
    assert (again.share, again.attempts) == (0.5, 1), "what was done before is no progress"


def test_a_base_that_is_gone(settings: Settings) -> None:
    with pytest.raises(errors.CompressionFailed, match="no longer registered"):
        decide(settings, "v", tuned("v"))


def test_memory_grows_with_calibration_and_the_model(base: Model) -> None:
    assert base.spec is not None
    few = compressing.needed_bytes(base.spec, Recipe("deltacompress", rows=1, tokens=8))
    many = compressing.needed_bytes(base.spec, Recipe("deltacompress", rows=257, tokens=8))
    assert many - few == 2 * 256 * 8 * base.spec.hidden_size * 4
    large = replace(base.spec, num_layers=10_000)
    evaluated = compressing.needed_bytes(large, Recipe("deltacompress", evaluation="/t"))
    assert evaluated > 4 * large.weight_bytes // large.dtype_bytes, "all of it answers, in float32"


def test_reservations_are_orphans_once_the_model_is_not_compressed() -> None:
    promised = ledger("compressing:v")
    assert reservations.orphans(state(tuned("v"), promised)) == []
    assert reservations.orphans(state(replace(tuned("v"), uid=8), promised)) == ["compressing:v"]
    assert reservations.orphans(state(replace(tuned("v"), phase=Phase.READY), promised)) == ["compressing:v"]
    assert reservations.orphans(state(promised)) == ["compressing:v"]


# --- accuracy ----------------------------------------------------------------------------------


def quality(before: float, after: float, metric: str = "exact_match") -> Quality:
    return Quality((TaskLoss("t", metric, before, after, 0.0),))


@pytest.mark.parametrize(
    ("measured", "kept"),
    [
        (quality(0.8, 0.76), 95.0),
        (quality(0.5, 0.6), 100.0),
        (quality(0.0, 0.0), 100.0),
        (quality(0.8, 0.0), 0.0),
        (quality(10.0, 12.5, "perplexity"), 80.0),
        (Quality(()), 100.0),
        (Quality((*quality(0.5, 0.5).losses, *quality(0.5, 0.4).losses)), 80.0),
    ],
)
def test_the_remaining_accuracy_is_in_percent(measured: Quality, kept: float) -> None:
    assert measured.accuracy == pytest.approx(kept)


def test_the_measured_accuracy_is_registered_unless_the_user_gave_one() -> None:
    evaluated = quality(0.8, 0.76)
    assert accuracy.registered({}, evaluated) == {"none": pytest.approx(95.0)}
    assert accuracy.registered({"none": 97.0}, evaluated) == {"none": 97.0}
    assert accuracy.registered({}, None) == {}


def made(**compression: float) -> Model:
    delta = Delta(Recipe("magnitude"), artifact=ARTIFACT)
    return replace(tuned("v"), phase=Phase.READY, delta=delta, compression=compression)


def test_a_base_must_make_up_for_what_its_variant_lost() -> None:
    assert accuracy.base_limit(made(none=95.0), None) is None
    assert accuracy.base_limit(made(none=95.0), 90.25) == pytest.approx(95.0)
    assert accuracy.base_limit(made(none=95.0), 95.0) == pytest.approx(100.0)


def test_less_than_is_asked_for_is_refused_with_what_there_is() -> None:
    with pytest.raises(errors.NoFeasiblePlan, match=r"accuracy of 95 instead of 96") as refusal:
        accuracy.base_limit(made(none=95.0), 96.0)
    assert refusal.value.details["binding"] == "SLOs.accuracy"
    assert refusal.value.details["relaxations"][0]["offered"] == 95.0


def test_an_unmeasured_loss_is_not_taken_as_zero() -> None:
    with pytest.raises(errors.NoFeasiblePlan, match="is unknown"):
        accuracy.base_limit(made(), 50.0)
    lora = Model("v", 7, Phase.READY, base="b", adapter="/a")
    assert accuracy.base_limit(lora, 99.0) == pytest.approx(99.0)


def test_a_user_s_figures_of_other_techniques_keep_the_measured_figure() -> None:
    evaluated = replace(ARTIFACT, quality=quality(0.8, 0.76))
    given = made(int8=99.0)
    assert given.delta is not None
    measured = replace(given, delta=replace(given.delta, artifact=evaluated))
    assert accuracy.of_variant(measured) == pytest.approx(95.0)
    assert accuracy.of_variant(replace(measured, compression={"int8": 99.0, "bf16": 97.0})) == 97.0
    assert accuracy.of_variant(given) is None


def test_engines_that_run_must_be_as_accurate() -> None:
    base = Model("b", 1, Phase.READY, source="/m", compression={"none": 100.0, "fp8": 97.0})
    fp8 = replace(PLACED, plan=replace(PLACED.plan, quantization="fp8"))
    accuracy.require_base(base, deployment("b", Phase.DEPLOYED, placed=fp8), 97.0)
    accuracy.require_base(base, deployment("b", Phase.DEPLOYED), 100.0)
    accuracy.require_base(base, None, 100.0)
    with pytest.raises(errors.NoFeasiblePlan, match="97"):
        accuracy.require_base(base, deployment("b", Phase.DEPLOYED, placed=fp8), 98.0)


def test_any_of_the_engines_that_run_must_be_as_accurate() -> None:
    base = Model("b", 1, Phase.READY, source="/m", compression={"none": 100.0, "fp8": 97.0})
    one = deployment("b", Phase.DEPLOYED)
    fp8 = replace(PLACED, plan=replace(PLACED.plan, quantization="fp8"))
    both = replace(one, groups=(*one.groups, replace(one.groups[0], number=1, placement=fp8)))
    with pytest.raises(errors.NoFeasiblePlan, match="97"):
        accuracy.require_base(base, both, 98.0)
    leaving = replace(both, groups=(both.groups[0], replace(both.groups[1], phase=GroupPhase.DRAINING)))
    accuracy.require_base(base, leaving, 98.0)


def test_a_base_that_cannot_reach_the_accuracy_is_refused_before_placement() -> None:
    base = Model("b", 1, Phase.READY, source="/m", compression={"fp8": 97.0, "int8": 96.0})
    waiting = deployment("b", Phase.PENDING, placed=None)
    accuracy.require_base(base, waiting, 97.0)
    with pytest.raises(errors.NoFeasiblePlan, match="97"):
        accuracy.require_base(base, waiting, 98.0)
