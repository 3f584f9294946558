"""The request path: its fit, and what a client sees of an engine behind it, against a queue that is
followed event by event."""

from __future__ import annotations

import dataclasses
import heapq
import math
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from profiler import request_path
from profiler.predicting.predict import predict
from profiler.request_path import (
    ONE_DIRECTION,
    Burst,
    EngineCurve,
    EngineTimes,
    RequestPath,
    counts_together,
    fit,
    served_s,
)
from profiler.types import Workload
from testkit.simulated_profile import ground, plan


@dataclass
class Front:
    """One process that every request passes on its way in and its first token on its way out, one after the
    other, before an engine that takes `engine_s` for the prompts of a step, and `step_s` for one in which
    requests decode. What is in a step is settled when the one before it begins."""

    each_s: float  # of one direction
    around_s: float  # on no process of this host: it delays no process
    engine_s: Callable[[int], float]
    step_s: float = 0.0

    def run(self, batch: int) -> list[float]:
        jobs: list[tuple[float, int, str, int]] = [(0.0, n, "in", n) for n in range(batch)]
        waiting: list[int] = []
        settled: list[int] = []
        running: tuple[float, list[int]] | None = None
        first_s: dict[int, float] = {}
        free_s, order = 0.0, batch
        while len(first_s) < batch:
            done_s = max(free_s, jobs[0][0]) + self.each_s if jobs else float("inf")
            if running is not None and running[0] <= done_s:
                end_s, members = running
                for n in members:
                    order += 1
                    heapq.heappush(jobs, (end_s, order, "out", n))
                if not settled and not waiting and not self.step_s:
                    running = None
                    continue
                running = (end_s + (self.engine_s(len(settled)) if settled else self.step_s), settled)
                settled, waiting = waiting, []
                continue
            _, _, direction, n = heapq.heappop(jobs)
            free_s = done_s
            if direction == "out":
                first_s[n] = done_s
            elif running is None:
                running = (done_s + self.engine_s(1), [n])
            else:
                waiting.append(n)
        return [self.around_s + first_s[n] for n in range(batch)]


def engine_times(front: Front, batch: int) -> EngineCurve:
    taken_s = {count: front.engine_s(count) for count in counts_together(batch)}
    return EngineCurve.of({n: EngineTimes(seconds, seconds, front.step_s) for n, seconds in taken_s.items()})


def measured(front: Front, batches: Sequence[int] = (1, 8, 32)) -> RequestPath:
    """The path as measured with an engine that answers at once."""
    instant = Front(front.each_s, front.around_s, lambda count: 0.0)
    bursts = [Burst(16, tuple(instant.run(batch))) for batch in batches for _ in range(3)]
    return fit(bursts)


@pytest.mark.parametrize("batch", [1, 2, 8, 32, 100])
@pytest.mark.parametrize("each_ms", [0.05, 0.4, 2.0])
@pytest.mark.parametrize("step_ms", [0.0, 5.0])
@pytest.mark.parametrize(("first_ms", "more_ms"), [(0.0, 0.0), (2.0, 0.1), (10.0, 1.6), (40.0, 20.0)])
def test_clients_see_the_queue_s_latency(
    batch: int, each_ms: float, first_ms: float, more_ms: float, step_ms: float
) -> None:
    """Engines from those that keep up with the path to those that are far slower."""
    step_s = min(step_ms, first_ms) / 1e3
    front = Front(each_ms / 1e3, 4e-3, lambda count: (first_ms + more_ms * (count - 1)) / 1e3, step_s)
    seen = statistics.mean(front.run(batch))
    found = served_s(measured(front), batch, 16, engine_times(front, batch)).ttft_s
    assert found == pytest.approx(seen, rel=0.15)


@pytest.mark.parametrize("batch", [8, 16, 32])
@pytest.mark.parametrize("each_ms", [1.0, 2.0, 4.0])
def test_a_few_requests_for_several_variants_take_nearly_as_long_as_many(batch: int, each_ms: float) -> None:
    """Each of four variants takes 10 ms of a step, and each further prompt 0.2 ms."""
    front = Front(each_ms / 1e3, 4e-3, lambda n: (10 * min(n, 4) + 0.2 * n) / 1e3, 5e-3)
    seen = statistics.mean(front.run(batch))
    found = served_s(measured(front), batch, 16, engine_times(front, batch)).ttft_s
    assert found == pytest.approx(seen, rel=0.12)


@pytest.mark.parametrize("batch", [2001, 5000, 20_000])
@given(data=st.data())
@settings(max_examples=40)
def test_following_some_steps_is_as_good_as_following_all(batch: int, data: st.DataObject) -> None:
    """Engines from those that idle between arrivals to those with more work in each step than in the step
    before."""

    def drawn(low: float, high: float) -> float:
        """Seconds, as likely of each magnitude."""
        return math.exp(data.draw(st.floats(math.log(low), math.log(high))))

    path = RequestPath(10e-3, drawn(1e-5, 0.05), 1e-6, 1.0, 1.0)
    one_s, apart_s = drawn(1e-4, 0.5), path.each_s * ONE_DIRECTION
    more_s = data.draw(st.sampled_from([0.0, drawn(1e-6, 0.1), apart_s * drawn(0.95, 1.05)]))
    step_s = one_s * data.draw(st.floats(0, 1))
    one = EngineTimes(one_s, one_s, step_s)
    last_s = one_s + more_s * (batch - 1)
    whole = EngineTimes(one_s + (last_s - one_s) / 2, last_s, step_s)
    engine = EngineCurve((1, batch), (one, whole))
    found = served_s(path, batch, 16, engine).ttft_s
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(request_path, "STEPS", 10 * batch)
        assert found == pytest.approx(served_s(path, batch, 16, engine).ttft_s, rel=0.01)


def test_the_largest_load_takes_no_longer() -> None:
    """It took seconds of CPU for each estimate, a step for each request."""
    one = EngineTimes(3e-3, 3e-3, 3e-3)
    steps = 0

    class Counted(EngineTimes):
        def toward(self, other: EngineTimes, share: float) -> EngineTimes:
            nonlocal steps
            steps += 1
            return super().toward(other, share)

    path = RequestPath(10e-3, 20e-3, 0.0, 1.0, 1.0)
    engine = EngineCurve((1, 1_000_000), (Counted(one.mean_s, one.last_s, one.step_s), one))
    found = served_s(path, 1_000_000, 16, engine).ttft_s
    assert found == pytest.approx(path.mean_s(1_000_000, 16))
    assert steps <= request_path.STEPS


def test_the_h200s_first_run_is_explained() -> None:
    """A 7B shape: 10.3 ms predicted and 23.6 seen for one request, 22.4 and 51.6 (median) for eight. The path
    alone explains the first. The first of eight begins alone, with another step behind it, which explains
    most of the difference for eight."""
    front = Front(0.4e-3, 12.5e-3, lambda count: (10.3 + 12.1 * (count - 1) / 7) / 1e3, 4.9e-3)
    assert statistics.mean(front.run(1)) == pytest.approx(23.6e-3, rel=0.02)
    path = measured(front)
    found = served_s(path, 8, 16, engine_times(front, 8)).ttft_s
    seen = front.run(8)
    assert statistics.median(seen) == pytest.approx(51.6e-3, rel=0.1)
    assert found == pytest.approx(statistics.mean(seen), rel=0.1)


@given(
    st.floats(1e-4, 0.05), st.floats(0, 5e-3), st.floats(0, 5e-6), st.integers(0, 1000), st.integers(2, 64)
)
def test_a_fit_finds_what_it_was_made_of(
    alone_s: float, each_s: float, token_s: float, seed: int, most: int
) -> None:
    rng = random.Random(seed)
    made = RequestPath(alone_s, each_s, token_s, 1.0, 1.0)
    bursts = [
        Burst(tokens, (made.mean_s(batch, tokens),) * batch)
        for batch, tokens in ((1, 16), (1, 1024), (1, 16), (most, 16))
        for _ in range(3)
    ]
    rng.shuffle(bursts)
    found = fit(bursts)
    for batch, tokens in ((1, 16), (1, 500), (most, 16)):
        assert found.mean_s(batch, tokens) == pytest.approx(made.mean_s(batch, tokens), rel=1e-6)
    assert found.low < 1 < found.high


def test_noise_widens_and_too_little_is_refused() -> None:
    rng = random.Random(1)
    made = RequestPath(10e-3, 1e-3, 1e-6, 1.0, 1.0)
    bursts = [
        Burst(tokens, tuple(made.mean_s(batch, tokens) * rng.uniform(0.7, 1.4) for _ in range(batch)))
        for batch, tokens in ((1, 16), (1, 1024), (8, 16))
        for _ in range(9)
    ]
    found = fit(bursts)
    assert found.mean_s(1, 16) == pytest.approx(made.mean_s(1, 16), rel=0.15)
    quiet = [Burst(b.input_tokens, (made.mean_s(b.batch, b.input_tokens),) * b.batch) for b in bursts]
    assert found.high - found.low > fit(quiet).high - fit(quiet).low
    for few in ([], bursts[:1], [b for b in bursts if b.batch == 1], [b for b in bursts if b.batch == 8]):
        with pytest.raises(ValueError, match="expected"):
            fit(few)


PATH = RequestPath(12e-3, 1e-3, 2e-6, 0.8, 1.3)


@pytest.mark.parametrize("batch", [1, 8, 32])
@pytest.mark.parametrize("known", [True, False])
def test_an_estimate_separates_request_path_and_engine(batch: int, known: bool) -> None:
    load, here = Workload(batch, 128, 32), ground(plan(), known)
    alone = predict(here, plan(), load)
    assert alone.path_s is None
    assert alone.engine_ttft_s is None
    found = predict(dataclasses.replace(here, path=PATH), plan(), load)
    assert found.path_s is not None
    assert found.engine_ttft_s == alone.ttft_s
    assert found.path_s.value == pytest.approx(PATH.mean_s(batch, 128))
    if batch == 1:
        assert found.ttft_s.value == pytest.approx(alone.ttft_s.value + PATH.mean_s(1, 128))
    for end in ("value", "low", "high"):
        later = getattr(found.ttft_s, end) - getattr(alone.ttft_s, end)
        assert getattr(found.latency_s, end) == pytest.approx(getattr(alone.latency_s, end) + later)
    assert found.ttft_s.low < found.ttft_s.value < found.ttft_s.high
    assert found.tokens_per_s.value == pytest.approx(32 * batch / found.latency_s.value)
    assert found.tpot_s.value >= alone.step_s.value
    assert (found.step_s, found.ranks) == (alone.step_s, alone.ranks)
