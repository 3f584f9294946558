"""How long the steps of a placed model take on GPUs that nobody else uses: by the estimator that placed it.

`benchmarks.reproduction.site` gives a layout's time for a prompt and for a token under a load of one size. It
is asked for each of some sizes, and the simulator reads between them. A step that fills prompts holds the
whole pipeline: prompts do not overlap in it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.reproduction.site import Site
from placement.solver.layout import Layout, plan_of
from placement.solver.memory import stage_bytes
from placement.solver.plan import CandidatePlan, Shape
from placement.solver.request import Request
from placement.solver.view import view_of
from placement.types import Placement
from profiler.compiled import Records, records
from profiler.step_time.records import MAX_ROWS, PREFILL_KNOTS, STEP_MODEL

ROWS = (1, 2, 3, 4, 5, 6, 8, 12, 16, 32, 64)
PROMPTS = (1, 64, 128, 256, 512, 1024, 2048)
BATCHED_TOKENS = 2048
LONG = 512
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Deployed:
    """One copy of a model. `streamed`: the share of its weights that each step reads from the host's memory,
    at `stream_bytes_per_s` for each GPU, because they have no room."""

    request: Request
    layout: Layout
    streamed: float = 0.0
    stream_bytes_per_s: float = 1.0

    @property
    def gpus(self) -> tuple[int, ...]:
        return tuple(gpu for group in self.layout.groups for gpu in group)

    def memory_bytes(self, site: Site) -> int:
        """Of all its ranks, with room for its KV cache."""
        each = stage_bytes(site.estimator(self.request), self.layout.shape, self.layout.layers)
        return self.layout.shape.tp * sum(each)


def of_placement(request: Request, placed: Placement) -> Deployed:
    """A decision of a policy, on a cluster of one node."""
    tp, pp = placed.plan.tensor_parallel, placed.plan.pipeline_parallel
    compression = next(one for one in request.model.compressions if one.name == placed.plan.quantization)
    groups = tuple(
        tuple(rank.device_index for rank in placed.ranks if rank.stage == stage) for stage in range(pp)
    )
    return Deployed(request, Layout(Shape(compression, tp, pp), groups, placed.plan.layers_per_stage))


@dataclass(frozen=True)
class Steps:
    """`model` [1]; `occupancy` [MAX_ROWS + 1]."""

    model: Records
    occupancy: Floats


def steps_of(site: Site, deployed: Deployed) -> Steps:
    request = replace(deployed.request, rate_per_s=0.0)
    plan = plan_of(view_of(site.idle, request), deployed.layout)
    short, long = (replace(request, input_tokens=tokens, output_tokens=1) for tokens in (1, LONG))
    bare = _tokens(site, short, plan)
    context_s = max(0.0, _token_s(site, long, plan, ROWS[-1]) - bare[-1]) / (ROWS[-1] * (LONG - 1))
    streamed_s = _streamed_s(deployed)
    model = records(STEP_MODEL, 1)
    rows = np.arange(MAX_ROWS + 1)
    slope = (bare[-1] - bare[-2]) / (ROWS[-1] - ROWS[-2])
    decode_s = np.interp(rows, ROWS, bare) + np.maximum(0, rows - ROWS[-1]) * slope
    model.decode_s = streamed_s + decode_s
    model.prefill_grain = BATCHED_TOKENS / PREFILL_KNOTS
    knots = np.arange(PREFILL_KNOTS + 1) * (BATCHED_TOKENS / PREFILL_KNOTS)
    prompts = [site.estimator(replace(request, input_tokens=n))(plan).ttft_s for n in PROMPTS]
    model.prefill_s = streamed_s + np.interp(knots, PROMPTS, np.maximum.accumulate(prompts))
    model.context_s = context_s
    model.batched_tokens, model.kv_tokens = BATCHED_TOKENS, request.kv_tokens
    model.max_rows, model.slots = request.concurrency, 0
    return Steps(model, _occupancy(site, short, plan))


def _tokens(site: Site, request: Request, plan: CandidatePlan) -> Floats:
    seconds = [_token_s(site, request, plan, rows) for rows in ROWS]
    return np.asarray(np.maximum.accumulate(seconds))


def _token_s(site: Site, request: Request, plan: CandidatePlan, rows: int) -> float:
    return site.estimator(request, rows)(plan).tpot_s


def _occupancy(site: Site, request: Request, plan: CandidatePlan) -> Floats:
    """The share of a step in which the busiest stage works, by rows."""
    shares = []
    for rows in ROWS:
        estimator = site.estimator(request, rows)
        slowest_s = 0.0
        for number, part in enumerate(plan.stages):
            rates = estimator.rates(plan.shape, part.gpu_type, part.link)
            rest_s = rates.decode_rest_s if number == plan.shape.pp - 1 else rates.decode_gap_s
            slowest_s = max(slowest_s, part.layers * rates.decode_layer_s + rest_s)
        shares.append(min(1.0, estimator.groups(plan.shape) * slowest_s / estimator(plan).tpot_s))
    return np.asarray(np.interp(np.arange(MAX_ROWS + 1), ROWS, shares), np.float64)


def _streamed_s(deployed: Deployed) -> float:
    """All GPUs of a stage read at once, stages one after the other."""
    shape: Any = deployed.layout.shape
    weights = shape.compression.layer_bytes * deployed.request.model.layers / shape.tp
    return float(deployed.streamed * weights / deployed.stream_bytes_per_s)
