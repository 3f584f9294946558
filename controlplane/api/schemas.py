"""Requests and answers of the management API (names from MaverIQ, Table 1), as users see them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, model_validator

from controlplane.api.residency_views import EngineResidencyView
from controlplane.records import Deployment, Model, Operation
from placement.types import Intent, Slos
from profiler.variants.types import VariantSpec

Name = Annotated[
    str,
    StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,94}$"),
    Field(description="1 to 95 letters, digits, '.', '_' or '-', starting with a letter or digit."),
]
Uri = Annotated[str, StringConstraints(min_length=1, max_length=4096)]
IntentName = Literal["minCost", "minLat", "latSLO", "costSLO", "accSLO"]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class RegisterModelRequest(_Strict):
    """A base model by its `source`, or a variant by its `base` (a registered name) and `adapter`."""

    model: Name
    source: Uri | None = Field(default=None, description="file://..., bundled://... or an absolute path.")
    base: Name | None = None
    adapter: Uri | None = Field(
        default=None,
        description="The variant's folder (LoRA, BOFT or compressed delta): file://... or a path.",
    )
    compressionTechnique: dict[
        Annotated[str, StringConstraints(min_length=1, max_length=64)],
        Annotated[float, Field(ge=0, le=100, allow_inf_nan=False)],
    ] = Field(
        default_factory=lambda: {"none": 100.0}, max_length=32, description="Accuracy of each technique, %."
    )

    @model_validator(mode="after")
    def _base_or_variant(self) -> RegisterModelRequest:
        if (self.source is None) == (self.base is None) or (self.base is None) != (self.adapter is None):
            raise ValueError(
                "give either `source` (a base model) or both `base` and `adapter` (a variant); "
                f"got {[k for k in ('source', 'base', 'adapter') if getattr(self, k) is not None]}"
            )
        if self.base == self.model:
            raise ValueError("a variant cannot be its own base")
        if not self.compressionTechnique:
            raise ValueError('compressionTechnique needs at least one entry, such as {"none": 100}')
        return self


class SloLimits(_Strict):
    """Limits; latencies in milliseconds, cost in GiB-seconds per request, accuracy in percent."""

    e2e_ms: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    ttft_ms: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    tpot_ms: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    cost_gib_s: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    accuracy: float | None = Field(default=None, ge=0, le=100, allow_inf_nan=False)

    def to_slos(self) -> Slos:
        def seconds(value_ms: float | None) -> float | None:
            return None if value_ms is None else value_ms / 1000

        return Slos(
            latency_s=seconds(self.e2e_ms),
            ttft_s=seconds(self.ttft_ms),
            tpot_s=seconds(self.tpot_ms),
            cost_gib_s=self.cost_gib_s,
            accuracy=self.accuracy,
        )


_SLO_FIELDS: dict[str, tuple[str, ...]] = {
    "latSLO": ("e2e_ms", "ttft_ms", "tpot_ms"),
    "costSLO": ("cost_gib_s",),
    "accSLO": ("accuracy",),
}


class DeployModelRequest(_Strict):
    model: Name
    maxOutputLength: int = Field(default=256, ge=1, le=1_000_000)
    intent: IntentName = "minCost"
    SLOs: SloLimits = Field(default_factory=SloLimits)

    @model_validator(mode="after")
    def _slo_is_given(self) -> DeployModelRequest:
        wanted = _SLO_FIELDS.get(self.intent, ())
        if wanted and all(getattr(self.SLOs, name) is None for name in wanted):
            raise ValueError(f"intent {self.intent} needs at least one of SLOs.{', SLOs.'.join(wanted)}")
        return self

    @property
    def decided_intent(self) -> Intent:
        return {"minCost": Intent.MIN_COST, "minLat": Intent.MIN_LATENCY}.get(self.intent, Intent.SLO)


class InferenceModelRequest(_Strict):
    model: Annotated[str, StringConstraints(min_length=1, max_length=192)]
    inputText: Annotated[str, StringConstraints(min_length=1)]
    maxOutputLength: int | None = Field(default=None, ge=1, le=1_000_000)
    temperature: float | None = Field(default=None, ge=0, le=2)
    topP: float | None = Field(default=None, gt=0, le=1)
    seed: int | None = Field(default=None, ge=-(2**63), le=2**63 - 1)
    stop: list[Annotated[str, StringConstraints(min_length=1)]] | None = Field(default=None, max_length=16)
    format: Literal["chat", "raw"] = Field(
        default="chat", description="raw: no chat template around inputText."
    )


class InferenceModelResponse(BaseModel):
    model: str
    outputText: str
    finishReason: str | None
    inputTokens: int
    outputTokens: int


class EventView(BaseModel):
    at_s: float
    phase: str
    message: str


class OperationView(BaseModel):
    """A long-running request, as it stands. `done` is true when `phase` is final."""

    id: str
    kind: str
    target: str
    phase: str
    progress: float
    reason: str
    done: bool
    error: dict[str, Any] | None
    createdAt: float
    updatedAt: float
    events: list[EventView]

    @classmethod
    def of(cls, op: Operation) -> OperationView:
        return cls(
            id=op.id,
            kind=op.kind,
            target=op.target,
            phase=op.phase,
            progress=op.progress,
            reason=op.reason,
            done=op.done,
            error=op.error,
            createdAt=op.created_at_s,
            updatedAt=op.updated_at_s,
            events=[EventView(at_s=e.at_s, phase=e.phase, message=e.message) for e in op.events],
        )


class ModuleView(BaseModel):
    """One kind of module that a variant adapts: the largest values of any layer; 0 where meaningless."""

    sizeBytes: int
    rank: int
    factors: int
    blockSize: int


class VariantView(BaseModel):
    """What a variant's files hold. `bits` are the widths of stored codes; empty: floating point."""

    modules: dict[str, ModuleView]
    bits: list[int]
    fullBytes: int
    replacesEmbedding: bool
    replacesHead: bool

    @classmethod
    def of(cls, spec: VariantSpec) -> VariantView:
        return cls(
            modules={
                name: ModuleView(
                    sizeBytes=f.size_bytes, rank=f.rank, factors=f.factors, blockSize=f.block_size
                )
                for name, f in spec.modules.items()
            },
            bits=list(spec.bits),
            fullBytes=spec.full_bytes,
            replacesEmbedding=spec.replaces_embedding,
            replacesHead=spec.replaces_head,
        )


class ModelView(BaseModel):
    """A registered model. `kind` is base, lora, boft, sparse_delta or svd_delta, null until it is known.

    `path` is the folder it was read from, as the server sees it.
    """

    model: str
    kind: str | None = None
    phase: str
    source: str | None
    base: str | None
    adapter: str | None
    path: str | None = None
    compressionTechnique: dict[str, float]
    reason: str
    deployed: bool
    variants: list[str]
    weightBytes: int | None
    rank: int | None
    variant: VariantView | None = None
    createdAt: float

    @classmethod
    def of(cls, m: Model, deployed: bool, variants: list[str]) -> ModelView:
        known = m.spec or m.variant_spec
        variant = m.variant_spec
        return cls(
            model=m.name,
            kind="base" if not m.is_variant else variant.kind if variant else None,
            phase=m.phase,
            source=m.source,
            base=m.base,
            adapter=m.adapter,
            path=m.path,
            compressionTechnique=m.compression,
            reason=m.reason,
            deployed=deployed,
            variants=variants,
            weightBytes=known.weight_bytes if known else None,
            rank=(variant.max_rank or None) if variant else None,
            variant=VariantView.of(variant) if variant else None,
            createdAt=m.created_at_s,
        )


class RankView(BaseModel):
    rank: int
    stage: int
    node: str
    device: str
    layers: tuple[int, int]
    memoryBytes: int


class PlanView(BaseModel):
    """The chosen plan: its shape, where its ranks run, what it should cost, and why it was chosen."""

    tensorParallel: int
    layersPerStage: list[int]
    quantization: str
    maxModelLen: int
    kvCacheTokens: int
    maxVariants: int
    maxLoraRank: int
    ranks: list[RankView]
    estimatedTtftMs: float
    estimatedTpotMs: float
    accuracy: float
    reason: str


class TuneRequest(_Strict):
    """What can be changed of a deployment while it runs."""

    maxActiveVariants: int = Field(
        ge=1, le=1_000_000, description="Variants of this base that may run at once, 1 to its slots."
    )


class DeploymentView(BaseModel):
    """`maxActiveVariants` is what a base was told; null: as many as have slots.

    `residency` says for each replica of the engine where variants are: all of a base's, or the one that is
    described. It is null in lists, and while the engine does not answer; `residencyReason` says why.
    """

    model: str
    phase: str
    host: str
    intent: str
    maxOutputLength: int
    SLOs: SloLimits
    reason: str
    plan: PlanView | None
    createdAt: float
    maxActiveVariants: int | None = None
    residency: list[EngineResidencyView] | None = None
    residencyReason: str = ""

    @classmethod
    def of(cls, d: Deployment) -> DeploymentView:
        return cls(
            model=d.model,
            phase=d.phase,
            host=d.host,
            intent=d.intent,
            maxOutputLength=d.max_output_tokens,
            SLOs=_limits(d.slos),
            reason=d.reason,
            plan=_plan_view(d),
            createdAt=d.created_at_s,
            maxActiveVariants=d.max_active_variants,
        )


def _limits(slos: Slos) -> SloLimits:
    def ms(value_s: float | None) -> float | None:
        return None if value_s is None else value_s * 1000

    return SloLimits(
        e2e_ms=ms(slos.latency_s),
        ttft_ms=ms(slos.ttft_s),
        tpot_ms=ms(slos.tpot_s),
        cost_gib_s=slos.cost_gib_s,
        accuracy=slos.accuracy,
    )


def _plan_view(d: Deployment) -> PlanView | None:
    if d.placement is None:
        return None
    plan, estimate = d.placement.plan, d.placement.estimate
    return PlanView(
        tensorParallel=plan.tensor_parallel,
        layersPerStage=list(plan.layers_per_stage),
        quantization=plan.quantization,
        maxModelLen=plan.max_model_len,
        kvCacheTokens=plan.kv_cache_tokens,
        maxVariants=plan.max_variants,
        maxLoraRank=plan.max_lora_rank,
        ranks=[
            RankView(
                rank=r.rank,
                stage=r.stage,
                node=r.node,
                device=f"{r.device_kind}:{r.device_index}",
                layers=(r.layer_start, r.layer_end),
                memoryBytes=r.memory_bytes,
            )
            for r in d.placement.ranks
        ],
        estimatedTtftMs=estimate.ttft_s * 1000,
        estimatedTpotMs=estimate.tpot_s * 1000,
        accuracy=estimate.accuracy,
        reason=d.placement.reason,
    )


class ErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None = None
    code: str
    details: dict[str, Any] | None = None


class ErrorBody(BaseModel):
    """The OpenAI error object; every endpoint answers errors with it."""

    error: ErrorDetail


class LoadLoraAdapterRequest(_Strict):
    """As vLLM's; `base_model_name` may be left out while one base is deployed."""

    lora_name: Name
    lora_path: Uri
    base_model_name: Name | None = None
    load_inplace: Literal[False] = False


class UnloadLoraAdapterRequest(_Strict):
    lora_name: Name
    lora_int_id: int | None = None
