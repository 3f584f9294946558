"""The default estimator: a roofline per stage and layer, pipelines paced by their slowest stage under load.

Constants of communication are `profiler.estimate`'s, measured on H200s; rates are those of the GPU types.
"""

from __future__ import annotations

from functools import cached_property

from placement.solver.cluster import Cluster, GpuType, Link
from placement.solver.memory import kv_rank_bytes, stage_bytes
from placement.solver.plan import CandidatePlan, Figures, Shape, StepRates
from placement.solver.request import Request
from profiler.estimate import ALLREDUCE_S, HOP_S

ALLREDUCES_PER_LAYER = 2
PASSES = 12  # of the fixed point between latency and requests in flight; it contracts quickly


class Roofline:
    """Figures of one request's candidates on one cluster's GPU types.

    The batch is what the expected rate keeps in flight (rate x latency, Little's law) on the fastest type,
    stages even, at most `concurrency`. With as many groups in flight as there are stages, a token takes

        max( sum of stages + hops,  groups x slowest stage )

    as in `profiler.physical.pipeline`.
    """

    def __init__(self, cluster: Cluster, request: Request) -> None:
        self._request = request
        self._types = {kind.name: kind for kind in cluster.types}
        self._links = cluster.link_bytes_per_s
        self._batches: dict[Shape, float] = {}
        self._rates: dict[tuple[Shape, str, Link], StepRates] = {}

    def __call__(self, plan: CandidatePlan) -> Figures:
        shape, request = plan.shape, self._request
        prefill, decode, work = [], [], []
        for stage, part in enumerate(plan.stages):
            rates, last = self.rates(shape, part.gpu_type, part.link), stage == shape.pp - 1
            prefill.append(
                part.slowdown * (part.layers * rates.prefill_layer_s + last * rates.prefill_rest_s)
            )
            decode.append(part.slowdown * (part.layers * rates.decode_layer_s + last * rates.decode_rest_s))
            work.append(part.slowdown * (part.layers * rates.work_layer_s + last * rates.work_rest_s))
        hops = [self.hop_s(shape, link) for link in plan.hops]
        ttft_s = sum(prefill) + sum(hop for hop, _ in hops)
        tpot_s = max(sum(decode) + sum(hop for _, hop in hops), self.groups(shape) * max(decode))
        return Figures(
            ttft_s=ttft_s,
            tpot_s=tpot_s,
            latency_s=ttft_s + tpot_s * (request.output_tokens - 1),
            throughput_per_s=1 / max(work),
            memory_bytes=stage_bytes(request, shape, [part.layers for part in plan.stages]),
            utilisation=tuple(request.rate_per_s * busy for busy in work),
        )

    def rates(self, shape: Shape, gpu_type: str, link: Link) -> StepRates:
        key = (shape, gpu_type, link)
        if key not in self._rates:
            self._rates[key] = self._step(shape, self._types[gpu_type], link, self.batch(shape))
        return self._rates[key]

    def hop_s(self, shape: Shape, link: Link) -> tuple[float, float]:
        hidden, bandwidth = self._request.model.hidden_bytes, self._links[link]
        sequences = self.batch(shape) / self.groups(shape)
        return (
            HOP_S + self._request.input_tokens * hidden / bandwidth,
            HOP_S + sequences * hidden / bandwidth,
        )

    def groups(self, shape: Shape) -> float:
        return min(float(shape.pp), self.batch(shape))

    def batch(self, shape: Shape) -> float:
        """Requests in flight under the expected rate."""
        if shape not in self._batches:
            batch, request = 1.0, self._request
            for _ in range(PASSES):
                in_flight = request.rate_per_s * self._ideal_latency_s(shape, batch)
                batch = min(float(request.concurrency), max(1.0, in_flight))
            self._batches[shape] = batch
        return self._batches[shape]

    @cached_property
    def _fastest(self) -> GpuType:
        return max(self._types.values(), key=lambda kind: (kind.memory_bytes_per_s, kind.name))

    def _ideal_latency_s(self, shape: Shape, batch: float) -> float:
        rates, layers = self._step(shape, self._fastest, Link.FAST, batch), self._request.model.layers
        ttft_s = layers * rates.prefill_layer_s + rates.prefill_rest_s
        tpot_s = layers * rates.decode_layer_s + rates.decode_rest_s
        hops = (shape.pp - 1) * HOP_S
        return ttft_s + hops + (tpot_s + hops) * (self._request.output_tokens - 1)

    def _step(self, shape: Shape, kind: GpuType, link: Link, batch: float) -> StepRates:
        request = self._request
        prompt, outputs = request.input_tokens, request.output_tokens
        prefill = self._layer_s(shape, kind, link, prompt, 0.0)
        decode = self._decode_s(shape, kind, link, batch / min(shape.pp, batch))
        full = max(1.0, request.concurrency / shape.pp)
        work = prefill + outputs * self._decode_s(shape, kind, link, full) / full
        rest = request.model.head_bytes / shape.tp / kind.memory_bytes_per_s
        return StepRates(prefill, decode, work, rest, rest, rest * (1 + outputs / full))

    def _decode_s(self, shape: Shape, kind: GpuType, link: Link, sequences: float) -> float:
        context = self._request.input_tokens + self._request.output_tokens / 2
        return self._layer_s(shape, kind, link, sequences, sequences * context)

    def _layer_s(self, shape: Shape, kind: GpuType, link: Link, tokens: float, cached: float) -> float:
        """One layer for `tokens` new tokens that attend to `cached` ones."""
        model = self._request.model
        moved = shape.compression.layer_bytes / shape.tp + cached * kv_rank_bytes(model, shape)
        computed = tokens * model.layer_flops / shape.tp / kind.flops_per_s
        return max(moved / kind.memory_bytes_per_s, computed) + self._allreduces_s(shape.tp, link, tokens)

    def _allreduces_s(self, tp: int, link: Link, tokens: float) -> float:
        if tp == 1:
            return 0.0
        sent = 2 * (tp - 1) / tp * tokens * self._request.model.hidden_bytes / self._links[link]
        return ALLREDUCES_PER_LAYER * (ALLREDUCE_S + sent)
