"""What `benchmarks.reproduction` adds to the simulator: engines on one GPU, thinned traces, step times."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from benchmarks.placement_instances import model
from benchmarks.reproduction import promises, serving, systems
from benchmarks.reproduction.deltazip_testbeds import Testbed, a800, groups_of, h200
from benchmarks.reproduction.deltazip_testbeds import systems as of_testbed
from benchmarks.reproduction.replaying import replayed
from benchmarks.reproduction.site import paper_site
from benchmarks.reproduction.step_models import Deployed, steps_of
from benchmarks.reproduction.traffic import Traffic, fluctuating, thinned
from benchmarks.serving.workload import Request as Asked
from controlplane.simulation.traces import Trace
from controlplane.simulation.world import REFUSED, new_asked
from placement.solver.layout import Layout
from placement.solver.plan import Shape
from placement.solver.request import Request
from placement.types import Intent
from profiler.plans import even_stages

SITE = paper_site("pcie")
OUTPUT = 50


def request(name: str = "llama-2-7b") -> Request:
    return Request(name, model(name, "fp16"), Intent.MIN_LATENCY, concurrency=4, context=1024)


def deployed(*gpus: int, pp: int = 1) -> Deployed:
    asked = request()
    tp = len(gpus) // pp
    groups = tuple(tuple(gpus[i * tp : (i + 1) * tp]) for i in range(pp))
    shape = Shape(asked.model.compressions[0], tp, pp)
    return Deployed(asked, Layout(shape, groups, even_stages(asked.model.layers, pp)))


def at_once(models: list[int]) -> Traffic:
    """One request for each, all at the beginning."""
    asked = new_asked(len(models))
    asked.prompt, asked.output, asked.expected = 1, OUTPUT, OUTPUT
    asked.ttft_s = asked.tpot_s = np.inf
    return Traffic(asked, np.array(models), 100.0)


def ends_s(placed: systems.Placed, traffic: Traffic) -> tuple[np.ndarray, np.ndarray]:
    """Of each request, and of each GPU how long it was busy."""
    server = serving.Server(SITE, traffic, len(placed), 4)
    for number, one in placed:
        server.deploy(number, one)
    server.run(np.inf)
    return np.array(server.world.outcomes.end_s), server.busy_s(100.0)


def test_engines_apart_do_not_slow_each_other() -> None:
    (one, other), busy_s = ends_s([(0, deployed(0)), (1, deployed(1))], at_once([0, 1]))
    (alone,), _ = ends_s([(0, deployed(0))], at_once([0]))
    assert one == other == pytest.approx(alone)
    assert busy_s[:2] == pytest.approx([alone, alone])
    assert not busy_s[2:].any()


def test_two_on_one_gpu_go_at_half_the_speed_and_lose_no_work() -> None:
    (alone,), _ = ends_s([(0, deployed(0))], at_once([0]))
    (one, other), busy_s = ends_s([(0, deployed(0)), (1, deployed(0))], at_once([0, 1]))
    step_s = alone / OUTPUT
    assert one == pytest.approx(2 * alone, abs=2 * step_s)
    assert other == pytest.approx(2 * alone, abs=2 * step_s)
    assert busy_s[0] == pytest.approx(max(one, other))


def test_a_pipeline_with_one_request_keeps_each_gpu_busy_for_a_part() -> None:
    pipeline = deployed(0, 1, pp=2)
    (end,), busy_s = ends_s([(0, pipeline)], at_once([0]))
    assert busy_s[0] == pytest.approx(end / 2, rel=0.1)
    full = steps_of(SITE, pipeline).occupancy
    assert full[8] == pytest.approx(1.0, abs=0.05)


def test_who_asks_a_model_that_is_not_there_is_refused() -> None:
    server = serving.Server(SITE, at_once([0, 1]), 1, 4)
    server.deploy(1, deployed(0))
    server.run(np.inf)
    assert list(server.world.outcomes.state == REFUSED) == [True, False]


def test_a_step_takes_what_the_estimator_says() -> None:
    one = deployed(0, 1)
    steps = steps_of(SITE, one)
    weights = 32 * one.layout.shape.compression.layer_bytes + 2 * 32000 * 4096
    read_s = weights / 2 / 768e9  # two GPUs of 768 GB/s
    assert steps.model.decode_s[0, 1] == pytest.approx(read_s + 64 * 14.5e-6, rel=0.05)
    streamed = steps_of(SITE, dataclasses.replace(one, streamed=0.5, stream_bytes_per_s=10e9))
    added = streamed.model.decode_s - steps.model.decode_s
    assert added[0] == pytest.approx(0.25 * 32 * one.layout.shape.compression.layer_bytes / 10e9)


def test_thinning_keeps_requests_and_what_they_ask() -> None:
    whole = Trace(np.arange(1000, dtype=np.float64), np.full(1000, 600), np.arange(1, 1001), None)
    many, few = thinned(whole, 0.4, 3, 1), thinned(whole, 0.1, 3, 1)
    assert 300 < len(many.asked) < 500
    of_many = dict(zip(many.asked.arrival_s.tolist(), many.models.tolist(), strict=True))
    assert all(of_many[at] == asks for at, asks in zip(few.asked.arrival_s, few.models, strict=True))
    assert many.asked.prompt.max() == 512


def test_only_models_that_are_deployed_are_asked() -> None:
    traffic = fluctuating((5.0, 1.0, 5.0), 60.0, 10, 0)
    period = (traffic.asked.arrival_s // 60).astype(int)
    assert (traffic.models <= period).all()
    assert (np.diff(traffic.asked.arrival_s) >= 0).all()


def test_what_has_no_room_is_streamed() -> None:
    few, many = ([dataclasses.replace(request(), name=f"m{n}") for n in range(count)] for count in (2, 30))
    assert systems.accelerate_like(SITE, few)[0][1].streamed == 0.0
    held = sum(one.memory_bytes(SITE) for _, one in systems.accelerate_like(SITE, many))
    room = 8 * 48 * 2**30
    weights = 30 * 32 * few[0].model.compressions[0].layer_bytes
    assert systems.accelerate_like(SITE, many)[0][1].streamed == pytest.approx((held - room) / weights)


@pytest.mark.parametrize("bed", [a800(), h200()])
def test_slots_and_kv_cache_fit_the_memory(bed: Testbed) -> None:
    for system in of_testbed(bed, from_disk=True):
        each, base = (bed.model_bytes, 0.0) if system.whole else (bed.delta_bytes, bed.model_bytes)
        kv_bytes = groups_of(bed, system).kv_tokens * bed.cached_bytes
        assert system.slots * each + base + kv_bytes <= 0.9 * bed.memory_bytes
        assert kv_bytes > 16_000 * bed.cached_bytes


@pytest.mark.parametrize("name", list(promises.ENGINES))
def test_a_request_alone_takes_its_steps(name: str) -> None:
    """Each token after the first: a row, its variant, and what reading its cached tokens takes."""
    engine = promises.ENGINES[name]
    world = replayed([Asked(0.0, 1, 128, 101)], promises.scenario(engine))
    cached_ms = (128 + 50) * 0.5 * 2**20 / 4.2e12 * 1e3
    step_ms = engine.base_ms + engine.variant_ms + promises.ROW_MS + cached_ms
    found = promises.figures(world, 60.0)
    assert found["tpot_p90_s"] == pytest.approx(step_ms / 1e3, rel=0.01)
    assert found["unfinished"] == 0


def test_today_costs_are_those_that_were_measured() -> None:
    """28 deltas in a step, and 930 tokens of one beside 27, take what they took."""
    four = promises.ENGINES["deltas, 4 bits"]
    together_ms = four.base_ms + 27 * promises.ROW_MS + 28 * four.variant_ms
    assert together_ms == pytest.approx(25.26, abs=0.01)
    filling_ms = 930 * (promises.PROMPT_TOKEN_MS + four.token_ms)
    assert filling_ms + 27 * (four.variant_ms + promises.ROW_MS) == pytest.approx(55.6, abs=0.01)


def test_who_has_no_answer_in_time_counts_with_the_time_until_then() -> None:
    """Two requests of 1,000 tokens that take 5 s and more; the second is given up after 3."""
    whole = promises.ENGINES["whole models"]
    asked = [Asked(0.0, 1, 10, 1000), Asked(10.0, 1, 10, 1000)]
    found = promises.figures(replayed(asked, promises.scenario(whole)), 3.0)
    assert found["unfinished"] == 1
    assert promises.figures(replayed(asked, promises.scenario(whole)), 30.0)["unfinished"] == 0


@pytest.mark.parametrize(
    ("ttft_s", "agrees"), [(0.9, [True, True]), (1.1, [False, True]), (9.0, [False, False])]
)
def test_a_simulation_agrees_where_both_keep_a_promise_or_both_break_it(
    ttft_s: float, agrees: list[bool]
) -> None:
    measured = {"ttft_p90_s": 0.2, "tpot_p90_s": 0.03}
    found = promises.agree(measured, {"ttft_p90_s": ttft_s, "tpot_p90_s": 0.04})
    assert list(found.values()) == agrees
