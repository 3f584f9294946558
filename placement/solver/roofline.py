"""Time and memory of a stage, from a model's explicit figures alone: a roofline by layer.

Constants of communication come from `profiler.roofline`, measured on H200s; rates come from the GPU types.
"""

from __future__ import annotations

from placement.solver.cluster import Cluster, GpuType, Link
from placement.solver.memory import figures_lines, kv_rank_bytes
from placement.solver.plan import Account, CandidatePlan, Lines, Shape
from placement.solver.request import Request
from placement.solver.stage_estimator import StageEstimator
from profiler.predicting.intervals import ROUGH_FACTOR
from profiler.roofline import HOP_S, StageTime, allreduce_s, roofline_s
from profiler.types import Basis, Plan

ALLREDUCES_PER_LAYER = 2


class Roofline(StageEstimator):
    def __init__(self, cluster: Cluster, request: Request) -> None:
        super().__init__(cluster, request)
        self._lines: dict[tuple[Shape, bool, bool], Lines] = {}

    @property
    def hidden_bytes(self) -> int:
        return self._request.model.hidden_bytes

    @property
    def boundary_s(self) -> float:
        return HOP_S

    def prompt_time(self, shape: Shape, kind: GpuType, link: Link) -> StageTime:
        return self._time(shape, kind, link, self._request.input_tokens, 0.0)

    def token_time(self, shape: Shape, kind: GpuType, link: Link, sequences: float) -> StageTime:
        context = self._request.input_tokens + self._request.output_tokens / 2
        return self._time(shape, kind, link, sequences, sequences * context)

    def lines(self, shape: Shape, stage: int) -> Lines:
        key = (shape, stage == 0, stage == shape.pp - 1)  # the stages between the ends are alike
        if key not in self._lines:
            self._lines[key] = figures_lines(self._request, shape, stage)
        return self._lines[key]

    def account(self, plan: CandidatePlan) -> Account:
        request, shape = self._request, plan.shape
        length = request.context or request.input_tokens + request.output_tokens
        quantization = shape.compression.name
        made = Plan(
            shape.tp,
            plan.layers,
            quantization,
            length,
            request.kv_tokens,
            0,
            0,
            max_sequences=request.concurrency,
        )
        share = (1 / ROUGH_FACTOR, ROUGH_FACTOR)
        return Account(made, Basis.ROUGH, share, share)

    def _time(self, shape: Shape, kind: GpuType, link: Link, tokens: float, cached: float) -> StageTime:
        """The time of `tokens` new tokens that attend to `cached` tokens. For the head only reading it
        counts."""
        model = self._request.model
        moved = shape.compression.layer_bytes / shape.tp + cached * kv_rank_bytes(model, shape)
        rates = kind.rates(shape.tp)
        layer_s = roofline_s(moved, tokens * model.layer_flops / shape.tp, rates)
        sent = tokens * model.hidden_bytes
        layer_s += ALLREDUCES_PER_LAYER * allreduce_s(shape.tp, sent, self._links[link])
        return StageTime(layer_s, roofline_s(model.head_bytes / shape.tp, 0.0, rates))
