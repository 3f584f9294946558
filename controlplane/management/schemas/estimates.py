"""Profiles and estimates as users see them: requests and answers. Times in milliseconds, sizes in bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from pydantic import Field, StringConstraints

from controlplane.management.schemas.common import IntervalView, Strict, View
from controlplane.management.schemas.placement import VariantsAtOnceView
from controlplane.state.terms import EXPECTED_INPUT_TOKENS, EXPECTED_OUTPUT_TOKENS

if TYPE_CHECKING:
    from controlplane.planning.estimates import Answer
    from controlplane.state.records import ModelProfile
    from profiler.predicting.predict import RankCost

_VariantName = Annotated[str, StringConstraints(min_length=1, max_length=192)]


class ProfileRequest(Strict):
    again: bool = Field(default=False, description="Measure everything again, not only what is missing.")


class LoadRequest(Strict):
    """Requests that arrive together at an idle engine, for `variants` in turn; the base may be among them."""

    batch: int = Field(default=1, description="Requests at once, at least 1.")
    inputTokens: int = Field(default=EXPECTED_INPUT_TOKENS, description="Tokens of each prompt, at least 1.")
    outputTokens: int = Field(
        default=EXPECTED_OUTPUT_TOKENS, description="Tokens of each answer, at least 1."
    )
    variants: list[_VariantName] = Field(default_factory=list, max_length=1000)
    devices: int | None = Field(
        default=None,
        description="Assume this number of devices like the cluster's, one per rank. Default: the cluster's.",
    )


class PlansRequest(LoadRequest):
    """A load, and the devices that plans may use."""


class EstimateRequest(LoadRequest):
    """A plan and a load. Without `layersPerStage` it has `pipelineParallel` even stages."""

    tensorParallel: int = 1
    pipelineParallel: int | None = None
    layersPerStage: list[int] | None = Field(default=None, max_length=1000)
    quantization: Annotated[str, StringConstraints(max_length=64)] = "none"


class RankCostView(View):
    rank: int
    stage: int
    layers: int
    weightBytes: int
    activationBytes: int
    graphBytes: int
    runtimeBytes: int
    variantBytes: int
    kvCacheBytes: int
    totalBytes: IntervalView

    @classmethod
    def of(cls, rank: int, stage: int, layers: int, cost: RankCost) -> RankCostView:
        return cls(
            rank=rank,
            stage=stage,
            layers=layers,
            weightBytes=cost.weights,
            activationBytes=cost.activations,
            graphBytes=cost.graphs,
            runtimeBytes=cost.runtime,
            variantBytes=cost.variants,
            kvCacheBytes=cost.kv_cache,
            totalBytes=IntervalView.of(cost.total),
        )


class VariantLoadView(View):
    """What the variants of the batch add to a layer: ranks over its requests, bytes of distinct variants."""

    requests: int
    rankSum: int
    rankMax: int
    distinctBytesPerLayer: int
    boftBlocksPerLayer: int


class EstimateView(View):
    """What a plan of the base `model` costs under a load.

    `basis` is `profile` (measured on this kind of device) or `rough` (a roofline); `notes` say what was not
    measured. `ttftMs`, `tpotMs` and `latencyMs` are as clients see them, who wait between their tokens for
    the prompts of others: `pathMs` is what the request path through proxy, gateway and the engine's front
    takes, `engineTtftMs` what the engine takes of prompts that reach it together; of one request `ttftMs` is
    their sum. Where the path was not measured it is assumed. `kvCapacityTokens` fit into the devices' free
    memory next to all else; `concurrency` such requests run at once, as many as fit and as an engine runs at
    most; both are null where there are not enough devices. `costGibS` is memory x latency.
    `variantsAtOnce`: how many of the base's registered variants run at once in an engine of this plan.
    """

    model: str
    basis: str
    notes: list[str]
    tensorParallel: int
    layersPerStage: list[int]
    quantization: str
    batch: int
    inputTokens: int
    outputTokens: int
    variants: list[str]
    variantLoad: VariantLoadView | None
    ttftMs: IntervalView
    engineTtftMs: IntervalView | None = None
    pathMs: IntervalView | None = None
    tpotMs: IntervalView
    latencyMs: IntervalView
    tokensPerSecond: IntervalView
    ranks: list[RankCostView]
    memoryBytes: float
    kvCapacityTokens: int | None
    concurrency: int | None
    costGibS: float
    pareto: bool | None = None
    variantsAtOnce: VariantsAtOnceView | None = None

    @classmethod
    def of(cls, a: Answer) -> EstimateView:
        p, plan = a.prediction, a.plan
        return cls(
            model=a.model,
            basis=p.basis,
            notes=list(p.notes),
            tensorParallel=plan.tensor_parallel,
            layersPerStage=list(plan.layers_per_stage),
            quantization=plan.quantization,
            batch=a.load.batch,
            inputTokens=a.load.input_tokens,
            outputTokens=a.load.output_tokens,
            variants=list(a.load.variants),
            variantLoad=_variant_load(a),
            ttftMs=IntervalView.of(p.ttft_s, 1e3),
            engineTtftMs=IntervalView.of(p.engine_ttft_s, 1e3) if p.engine_ttft_s else None,
            pathMs=IntervalView.of(p.path_s, 1e3) if p.path_s else None,
            tpotMs=IntervalView.of(p.tpot_s, 1e3),
            latencyMs=IntervalView.of(p.latency_s, 1e3),
            tokensPerSecond=IntervalView.of(p.tokens_per_s),
            ranks=_ranks(a),
            memoryBytes=a.memory_bytes,
            kvCapacityTokens=p.kv_capacity_tokens,
            concurrency=p.concurrency,
            costGibS=a.cost_gib_s,
            pareto=a.pareto,
            variantsAtOnce=VariantsAtOnceView.of(a.at_once),
        )


def _ranks(a: Answer) -> list[RankCostView]:
    tp, layers = a.plan.tensor_parallel, a.plan.layers_per_stage
    return [
        RankCostView.of(rank, rank // tp, layers[rank // tp], cost)
        for rank, cost in enumerate(a.prediction.ranks)
    ]


def _variant_load(a: Answer) -> VariantLoadView | None:
    load = a.prediction.variants
    if not load.rows:
        return None
    return VariantLoadView(
        requests=load.rows,
        rankSum=load.rank_sum,
        rankMax=load.rank_max,
        distinctBytesPerLayer=load.distinct_bytes,
        boftBlocksPerLayer=load.boft_blocks,
    )


class PlansView(View):
    """Every plan, fewest ranks first. None beats a `pareto` plan in latency, cost and memory at once."""

    plans: list[EstimateView]


class MeasuredView(View):
    """One measured load, on a fingerprint with `layersPerStage` layers. Its `variants` are synthetic. The
    engine launched the kernels of `launchedKinds` for it; without any, those of its variants' kinds."""

    tensorParallel: int
    layersPerStage: list[int]
    quantization: str = "none"
    batch: int
    inputTokens: int
    outputTokens: int
    variants: list[str] = Field(default_factory=list)
    launchedKinds: list[str] = Field(default_factory=list)
    ttftMs: float
    tpotMs: float


class ProfileView(View):
    """The profile of the architecture of the base `model`, which all models of this shape share.

    `phase` is null before the profile exists. `loads` of `plannedLoads` have been measured, in `seconds`.
    """

    model: str
    phase: str | None
    reason: str
    key: str | None = None
    architecture: str | None = None
    dtype: str | None = None
    device: str | None = None
    engineVersion: str | None = None
    seconds: float = 0.0
    plannedLoads: int = 0
    loads: list[MeasuredView] = Field(default_factory=list)

    @classmethod
    def of(cls, model: str, profile: ModelProfile | None) -> ProfileView:
        if profile is None:
            reason = f"not measured; `ostinato profile {model}` or POST /models/{model}/profile measures it"
            return cls(model=model, phase=None, reason=reason)
        return cls(
            model=model,
            phase=profile.phase,
            reason=profile.reason,
            key=profile.key,
            architecture=profile.architecture,
            dtype=profile.dtype,
            device=profile.device,
            engineVersion=profile.engine_version,
            seconds=profile.seconds,
            plannedLoads=profile.all_points,
            loads=_measured(profile),
        )


def _measured(profile: ModelProfile) -> list[MeasuredView]:
    # The server's: a client reads no measurements.
    from profiler.errors import MeasurementError
    from profiler.measurements import Timing, from_lines

    try:
        timings = [m for m in from_lines(profile.measurements, profile.key) if isinstance(m, Timing)]
    except MeasurementError:  # written by another version: it is measured again when it is used
        return []
    return [
        MeasuredView(
            tensorParallel=t.setting.tensor_parallel,
            layersPerStage=list(t.setting.layers_per_stage),
            quantization=t.setting.quantization,
            batch=t.point.batch,
            inputTokens=t.point.input_tokens,
            outputTokens=t.output_tokens,
            variants=[variant.label for variant in t.point.mix],
            launchedKinds=list(t.setting.launched),
            ttftMs=t.ttft_s * 1e3,
            tpotMs=t.tpot_s * 1e3,
        )
        for t in timings
    ]
