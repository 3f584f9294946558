"""An engine with a pipeline, event by event: an account of vLLM's scheduling that shares nothing with the
estimator, for models whose times are given by a formula."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from profiler.measurements import Point, Setting, Timing
from workers.measuring.timing import Arrivals, timing


@dataclass(frozen=True)
class Kernel:
    """A variant's time in a layer: its kind's kernels are launched once for all variants of the kind, and
    take at least `floor_s` to read them; each distinct variant is read once, and each token computed with."""

    kind: str
    read_bytes: float
    token_flops: float
    launch_s: float = 0.0
    floor_s: float = 0.0
    slower: float = 1.0  # computing, than the base's


@dataclass(frozen=True)
class Machine:
    """A layer takes the longer of moving its weights and computing, and a fixed time; so does the head."""

    layer_bytes: float = 400e6
    head_bytes: float = 260e6
    bandwidth: float = 3.5e12
    flops: float = 600e12
    launch_s: float = 12e-6
    pair_s: float = 5e-9  # a cached token read
    step_s: float = 250e-6
    hop_s: float = 100e-6
    once_s: float = 4e-3  # until an idle engine begins
    lost_pace: float = 0.0  # of its pace a stage that fills prompts loses until the batch before has landed
    cut_s: float = 15e-6  # all-reduces of a layer, for each doubling of TP
    busy: float = 1.0  # how much longer computing takes after the first step: a GPU lowers its clock
    mix: tuple[Kernel | None, ...] = ()  # asked by requests in turn
    launched: tuple[
        tuple[str, float], ...
    ] = ()  # kinds whose kernels any batch with variants launches; seconds

    def layer_s(self, tokens: int, pairs: float, tp: int, is_busy: bool = False) -> float:
        move, compute = self.layer_bytes / self.bandwidth, self.layer_bytes * tokens / self.flops
        compute *= self.busy if is_busy else 1.0
        return max(move, compute) / tp + self.launch_s + self.cut_s * math.log2(tp) + pairs * self.pair_s / tp

    def variants_s(self, parts: Sequence[tuple[Request, int, int]], tp: int) -> float:
        """The time of a layer in a step of these requests."""
        asked = [(self.mix[r.number % len(self.mix)], tokens) for r, tokens, _ in parts] if self.mix else []
        kernels = {id(kernel): kernel for kernel, _ in asked if kernel is not None}
        if not kernels:
            return 0.0
        launches = dict(self.launched) | {kernel.kind: kernel.launch_s for kernel in kernels.values()}
        total = sum(launches.values())
        for kind in launches:
            own = [kernel for kernel in kernels.values() if kernel.kind == kind]
            floor_s = max((kernel.floor_s for kernel in own), default=0.0)
            total += max(floor_s, sum(kernel.read_bytes for kernel in own) / self.bandwidth / tp)
        computed = sum(k.token_flops * k.slower * tokens for k, tokens in asked if k is not None)
        return total + computed / self.flops / tp

    def gap_s(self, batch: Batch) -> float:
        """The time between two decode steps of a stage in which no request ends."""
        return 0.0 if batch.fills else self.step_s + 2e-6 * len(batch.parts)

    def rest_s(self, sequences: int, tp: int) -> float:
        move, compute = self.head_bytes / self.bandwidth, self.head_bytes * sequences / self.flops
        return max(move, compute) / tp + self.step_s + 2e-6 * sequences


@dataclass
class Request:
    """`sent`: tokens of its prompt that are in steps, landed or in flight; `filled`: that have landed."""

    number: int
    prompt: int
    sent: int = 0
    filled: int = 0
    times: list[float] = field(default_factory=list)
    decodes_in_flight: bool = False


@dataclass(frozen=True)
class Batch:
    """Which requests take how many tokens each in a step, after how many."""

    parts: tuple[tuple[Request, int, int], ...]
    is_first: bool = False

    @property
    def fills(self) -> bool:
        return any(before < request.prompt for request, _, before in self.parts)

    @property
    def tells(self) -> bool:
        return any(before + count >= request.prompt for request, count, before in self.parts)

    def stage_s(self, machine: Machine, layers: int, last: bool, tp: int) -> float:
        tokens = sum(count for _, count, _ in self.parts)
        pairs = sum(n * (before + (n - 1) / 2 + (n > 1)) for _, n, before in self.parts)
        rest = machine.rest_s(len(self.parts), tp) if last else 0.0
        layer_s = machine.layer_s(tokens, pairs, tp, not self.is_first) + machine.variants_s(self.parts, tp)
        return layers * layer_s + rest


def simulate(
    machine: Machine, split: Sequence[int], tp: int, point: Point, output: int, batched_tokens: int
) -> Arrivals:
    requests = [Request(n, point.input_tokens) for n in range(point.batch)]
    free_at = [0.0] * len(split)
    flying: list[tuple[float, Batch]] = []
    landings = 0
    now, waits_s = machine.once_s, 0.0
    while any(len(r.times) < output for r in requests):
        is_first, has_room = not landings and not flying, len(flying) < len(split)
        batch = schedule(requests, output, batched_tokens, is_first) if has_room else None
        if batch is not None:
            lands_s = fly(machine, split, tp, batch, now, free_at, waits_s)
            waits_s = lands_s if batch.tells else waits_s
            flying.append((lands_s, batch))
            continue
        now, landed = min(flying, key=lambda item: item[0])
        flying.remove((now, landed))
        land(landed, now)
        landings += 1
    return Arrivals(tuple(tuple(r.times) for r in requests))


def schedule(requests: Sequence[Request], output: int, budget: int, is_first: bool = False) -> Batch | None:
    """Those that decode first, then prompts in order, within the budget; of a prompt the next tokens, also
    while others are in flight."""
    parts = []
    ready = [r for r in requests if r.sent < r.prompt or may_decode(r, output)]
    for request in sorted(ready, key=lambda r: (r.sent < r.prompt, r.number)):
        fills = request.sent < request.prompt
        count = min(request.prompt - request.sent if fills else 1, budget)
        if count:
            parts.append((request, count, request.sent if fills else request.prompt + len(request.times)))
            budget -= count
            request.sent += count * fills
            request.decodes_in_flight = not fills
    return Batch(tuple(parts), is_first) if parts else None


def may_decode(request: Request, output: int) -> bool:
    landed = request.filled == request.prompt and not request.decodes_in_flight
    return landed and len(request.times) < output


def fly(
    machine: Machine,
    split: Sequence[int],
    tp: int,
    batch: Batch,
    now: float,
    free_at: list[float],
    waits_s: float,
) -> float:
    """Through every stage as it becomes free; returns when it lands. Until `waits_s` the tokens of the batch
    before are waited for."""
    for stage, layers in enumerate(split):
        begin, last = max(now, free_at[stage]), stage == len(split) - 1
        left_s = batch.stage_s(machine, layers, last, tp)
        if batch.fills and not last:
            slow_s = min(left_s / (1 - machine.lost_pace), max(0.0, waits_s - begin))
            begin, left_s = begin + slow_s, left_s - slow_s * (1 - machine.lost_pace)
        now = begin + left_s
        between_s = machine.gap_s(batch) if not last else 0.0  # the last one's is in its rest
        free_at[stage] = now + between_s
        now += 0.0 if last else machine.hop_s
    return now


def land(batch: Batch, now: float) -> None:
    for request, count, before in batch.parts:
        request.decodes_in_flight = False
        if before < request.prompt:
            request.filled += count
        if request.filled == request.prompt:
            request.times.append(now)


def measured(
    machine: Machine, setting: Setting, point: Point, output: int, batched_tokens: int, noise: float = 1.0
) -> Timing:
    """The form of the measuring process's report."""
    run = simulate(machine, setting.layers_per_stage, setting.tensor_parallel, point, output, batched_tokens)
    slower = Arrivals(tuple(tuple(t * noise for t in times) for times in run.tokens))
    return timing(setting, point, output, [slower], ())


@dataclass(frozen=True)
class ClientSees:
    """Means over the requests of a burst, seconds; `latency_s` until the last one ends."""

    ttft_s: float
    tpot_s: float
    latency_s: float

    @classmethod
    def of(cls, tokens: Sequence[Sequence[float]]) -> ClientSees:
        """`tokens`: when each token of each request came."""
        gaps = [(times[-1] - times[0]) / (len(times) - 1) for times in tokens if len(times) > 1]
        return cls(
            sum(times[0] for times in tokens) / len(tokens),
            sum(gaps) / len(gaps) if gaps else 0.0,
            max(times[-1] for times in tokens),
        )
