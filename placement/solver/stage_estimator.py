"""A candidate's figures under a load, from the times of its stages: pipelines, batches, queues.

With `groups` batches in flight, one for each stage, a token takes (as in `profiler.physical.pipeline`)

    max( sum of stages + hops,  groups x (slowest stage + gap),  groups x the host's turn )

The batch is the number of requests that the expected rate keeps in flight (rate x latency, Little's law) on
the fastest type with even stages, at most `concurrency`. Other requests' prompts delay it. Let rho be the
share of a stage's time that prompts take. Then a prompt waits rho / (2 (1 - rho)) of a prompt's time for
earlier ones (M/D/1, Pollaczek-Khinchine), and 1 - rho of each second is left for decoding. Batch and rho are
assumed to be the same for all layouts of a shape, so a candidate's times stay linear in its layers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property

from placement.solver.cluster import Cluster, GpuType, Link
from placement.solver.memory import stage_bytes
from placement.solver.plan import Account, CandidatePlan, Figures, HopSeconds, Lines, Shape, StepRates
from placement.solver.request import Request
from profiler.roofline import StageTime

PASSES = 12  # of the fixed-point iteration between latency and requests in flight; it converges quickly
MAX_PROMPTS = 0.9  # of a stage's time; beyond that the rate is out of reach, which the throughput shows


@dataclass(frozen=True)
class Congestion:
    """How much other requests' prompts slow down a prompt and a token: factors of 1 or more."""

    prompt: float
    token: float


class StageEstimator(ABC):
    """Figures of one request's candidates on one cluster, from the times and bytes of single stages."""

    def __init__(self, cluster: Cluster, request: Request) -> None:
        self._request = request
        self._types = {kind.name: kind for kind in cluster.types}
        self._links = cluster.link_bytes_per_s
        self._shared = any(kind.shared for kind in cluster.types)
        self._batches: dict[Shape, float] = {}
        self._rates: dict[tuple[Shape, str, Link], StepRates] = {}
        self._hops: dict[tuple[Shape, Link], HopSeconds] = {}
        self._prompts: dict[Shape, StageTime] = {}
        self._congestions: dict[Shape, Congestion] = {}

    @property
    @abstractmethod
    def hidden_bytes(self) -> int:
        """Bytes of one token's hidden state."""

    @property
    @abstractmethod
    def boundary_s(self) -> float:
        """Seconds of passing a batch to the next stage, without its bytes."""

    @property
    def turn_s(self) -> float:
        """The least seconds of each of several batches in flight in a token's time, whatever its stages
        do."""
        return 0.0

    @property
    def path_s(self) -> float:
        """Seconds of a single request's path to the engine and of its first token's path back."""
        return 0.0

    @abstractmethod
    def prompt_time(self, shape: Shape, kind: GpuType, link: Link) -> StageTime:
        """Time of one prompt alone."""

    @abstractmethod
    def token_time(self, shape: Shape, kind: GpuType, link: Link, sequences: float) -> StageTime:
        """Time of a token of each of `sequences`, with the prompt and half of the output cached."""

    @abstractmethod
    def lines(self, shape: Shape, stage: int) -> Lines: ...

    @abstractmethod
    def account(self, plan: CandidatePlan) -> Account: ...

    def __call__(self, plan: CandidatePlan) -> Figures:
        shape, request = plan.shape, self._request
        prefill, decode, turns, work = [], [], [], []
        for stage, part in enumerate(plan.stages):
            rates, last = self.rates(shape, part.gpu_type, part.link), stage == shape.pp - 1
            prefill.append(
                part.slowdown * (part.layers * rates.prefill_layer_s + last * rates.prefill_rest_s)
            )
            decode.append(part.slowdown * (part.layers * rates.decode_layer_s + last * rates.decode_rest_s))
            turns.append(decode[-1] + part.slowdown * (not last) * rates.decode_gap_s)
            beside_s = rates.work_rest_s if last else rates.work_gap_s
            work.append(part.slowdown * (part.layers * rates.work_layer_s + beside_s))
        hops = [self.hop_s(shape, link) for link in plan.hops]
        ttft_s = self.path_s + sum(prefill) + sum(hop for hop, _ in hops)
        in_turn_s = max(self.groups(shape) * max(turns), self.turns_s(shape))
        tpot_s = max(sum(decode) + sum(hop for _, hop in hops), in_turn_s)
        busiest = sum(work) if self._shared else max(work)
        return Figures(
            ttft_s=ttft_s,
            tpot_s=tpot_s,
            latency_s=ttft_s + tpot_s * (request.output_tokens - 1),
            throughput_per_s=1 / busiest,
            memory_bytes=stage_bytes(self, shape, plan.layers),
            utilisation=tuple(request.rate_per_s * busy for busy in work),
        )

    def rates(self, shape: Shape, gpu_type: str, link: Link) -> StepRates:
        key = (shape, gpu_type, link)
        if key not in self._rates:
            self._rates[key] = self._step(shape, self._types[gpu_type], link)
        return self._rates[key]

    def hop_s(self, shape: Shape, link: Link) -> HopSeconds:
        key = (shape, link)
        if key not in self._hops:
            hidden, bandwidth = self.hidden_bytes, self._links[link]
            sequences = self.batch(shape) / self.groups(shape)
            self._hops[key] = HopSeconds(
                self.boundary_s + self._request.input_tokens * hidden / bandwidth,
                self.boundary_s + sequences * hidden / bandwidth,
            )
        return self._hops[key]

    def groups(self, shape: Shape) -> float:
        """Batches in flight: at most one for each stage. On one host, stages gain nothing from several
        batches."""
        return 1.0 if self._shared else min(float(shape.pp), self.batch(shape))

    def turns_s(self, shape: Shape) -> float:
        """The least seconds of a token, by the host's turns alone."""
        return self.turns(shape) * self.turn_s

    def turns(self, shape: Shape) -> float:
        """Turns of the host in a token's time: none with one batch in flight, else one per batch."""
        groups = self.groups(shape)
        return groups * min(1.0, groups - 1)

    def batch(self, shape: Shape) -> float:
        """Requests in flight under the expected rate."""
        if shape not in self._batches:
            batch, request = 1.0, self._request
            prompt_s = self._prompt(shape).of(request.model.layers, is_last=True)
            for _ in range(PASSES if request.rate_per_s > 0 else 0):  # idle: one at a time
                before = batch
                in_flight = request.rate_per_s * self._ideal_latency_s(shape, batch, prompt_s)
                batch = min(float(request.concurrency), max(1.0, in_flight))
                if batch == before:
                    break
            self._batches[shape] = batch
        return self._batches[shape]

    @cached_property
    def _fastest(self) -> GpuType:
        return max(self._types.values(), key=lambda kind: (kind.memory_bytes_per_s, kind.name))

    def _congestion(self, shape: Shape) -> Congestion:
        if shape not in self._congestions:
            prompt = self._prompt(shape)
            stages = 1 if self._shared else shape.pp
            stage_s = prompt.of(self._request.model.layers, is_last=True) / stages
            busy = min(MAX_PROMPTS, self._request.rate_per_s * stage_s)
            self._congestions[shape] = Congestion(1 + busy / (2 * (1 - busy)) / stages, 1 / (1 - busy))
        return self._congestions[shape]

    def _prompt(self, shape: Shape) -> StageTime:
        if shape not in self._prompts:
            self._prompts[shape] = self.prompt_time(shape, self._fastest, Link.FAST)
        return self._prompts[shape]

    def _ideal_latency_s(self, shape: Shape, batch: float, prompt: float) -> float:
        layers, slower = self._request.model.layers, self._congestion(shape)
        token = self.token_time(shape, self._fastest, Link.FAST, batch).of(layers, is_last=True)
        hops_s = (shape.pp - 1) * self.boundary_s
        per_token = token * slower.token + hops_s
        return prompt * slower.prompt + hops_s + per_token * (self._request.output_tokens - 1)

    def _step(self, shape: Shape, kind: GpuType, link: Link) -> StepRates:
        request, slower = self._request, self._congestion(shape)
        outputs, batch = request.output_tokens, self.batch(shape)
        prompt = self.prompt_time(shape, kind, link)
        token = self.token_time(shape, kind, link, batch / self.groups(shape))
        full = max(1.0, request.concurrency / (1 if self._shared else shape.pp))
        crowded = self.token_time(shape, kind, link, full)
        return StepRates(
            prefill_layer_s=prompt.layer_s * slower.prompt,
            decode_layer_s=token.layer_s * slower.token,
            work_layer_s=prompt.layer_s + outputs * crowded.layer_s / full,
            prefill_rest_s=prompt.rest_s * slower.prompt,
            decode_rest_s=token.rest_s * slower.token,
            work_rest_s=prompt.rest_s + outputs * crowded.rest_s / full,
            decode_gap_s=token.gap_s * slower.token,
            work_gap_s=0.0 if self._shared else outputs * crowded.gap_s / full,
        )
