"""Requests and answers of the management API (names from MaverIQ, Table 1), as users see them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import AfterValidator, Field, StringConstraints, model_validator

from controlplane.management.schemas.common import Name, NewName, Strict, View
from controlplane.management.schemas.compression import CompressionForm, CompressionView
from controlplane.management.schemas.deploy import (
    NO_PARSER,
    AntiAffinity,
    AutoRelax,
    EngineForm,
    LoadForm,
    Replicas,
    ReplicasChange,
    SloLimits,
    Targets,
)
from controlplane.management.schemas.evaluations import EvaluationView
from controlplane.management.schemas.placement import GroupView, PlanView, VariantsAtOnceView
from controlplane.management.schemas.residency import EngineResidencyView
from workers.fetching.remote_source import parse_remote

if TYPE_CHECKING:
    from controlplane.planning.variant_room import AtOnce
    from controlplane.state.records import Deployment, FetchedSource, Model, Operation
    from profiler.chat_format import ChatFormat
    from profiler.variants.types import VariantSpec


def _without_secrets(uri: str) -> str:
    """Refuse the URI of a remote source that cannot be read: it may have a password for no record."""
    parse_remote(uri)
    return uri


Uri = Annotated[str, StringConstraints(min_length=1, max_length=4096), AfterValidator(_without_secrets)]
Techniques = dict[
    Annotated[str, StringConstraints(min_length=1, max_length=64)],
    Annotated[float, Field(ge=0, le=100, allow_inf_nan=False)],
]


class RegisterModelRequest(Strict):
    """A base model by its `source`; a variant by its `base` (a registered name) and `adapter`; or a variant
    that is made here, by its `base`, the fine-tune's `source` and its `compression`."""

    model: NewName
    source: Uri | None = Field(
        default=None,
        description="The base model, or with `base` its fine-tune: a folder, ORG/NAME[@REVISION] of the hub, "
        "or a URI of the kind file, hf, s3, gs, https or bundled.",
    )
    base: Name | None = None
    adapter: Uri | None = Field(
        default=None,
        description="The variant (LoRA, BOFT or compressed delta): a folder, or a URI as in `source`.",
    )
    compression: CompressionForm | None = Field(
        default=None, description="How to compress the fine-tune `source` to a delta of `base`."
    )
    compressionTechnique: Techniques | None = Field(
        default=None,
        max_length=32,
        description='Accuracy of each technique, in percent. Default: {"none": 100}, or what was measured.',
    )

    @model_validator(mode="after")
    def _base_or_variant(self) -> RegisterModelRequest:
        given = tuple(k for k in ("source", "base", "adapter", "compression") if getattr(self, k) is not None)
        if given not in (("source",), ("base", "adapter"), ("source", "base", "compression")):
            raise ValueError(
                "give either `source` (a base model), or `base` and `adapter` (a variant), or `source`, "
                "`base` and `compression` (a fine-tune to compress to a delta of its base); got "
                f"{list(given)}"
            )
        if self.base == self.model:
            raise ValueError("a variant cannot be its own base")
        if self.compressionTechnique == {}:
            raise ValueError('compressionTechnique needs at least one entry, such as {"none": 100}')
        return self


class InferenceModelRequest(Strict):
    model: Annotated[str, StringConstraints(min_length=1, max_length=192)]
    inputText: Annotated[str, StringConstraints(min_length=1)]
    maxOutputLength: int | None = Field(default=None, ge=1, le=1_000_000)
    temperature: float | None = Field(default=None, ge=0, le=2)
    topP: float | None = Field(default=None, gt=0, le=1)
    seed: int | None = Field(default=None, ge=-(2**63), le=2**63 - 1)
    stop: list[Annotated[str, StringConstraints(min_length=1)]] | None = Field(default=None, max_length=16)
    format: Literal["auto", "chat", "raw"] = Field(
        default="auto",
        description="chat: inputText goes through the model's chat template; raw: inputText is completed as "
        "text; auto: chat if the model has a template, else raw.",
    )


class InferenceModelResponse(View):
    model: str
    outputText: str
    finishReason: str | None
    inputTokens: int
    outputTokens: int
    format: Literal["chat", "raw"] = Field(description="The format that was used.")
    note: str = Field(description="Why another format than usual was used; empty otherwise.")


class EventView(View):
    at_s: float
    phase: str
    message: str


class OperationView(View):
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
    tenant: str = ""

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
            tenant=op.tenant,
        )


class ModuleView(View):
    """One kind of module that a variant adapts: the largest values of any layer; 0 where meaningless."""

    sizeBytes: int
    rank: int
    factors: int
    blockSize: int


class VariantView(View):
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


class ChatView(View):
    """What reads a base's answers: vLLM's parsers, "" where none is known, and why these."""

    toolCallParser: str
    toolCallReason: str
    reasoningParser: str
    reasoningReason: str

    @classmethod
    def of(cls, chat: ChatFormat) -> ChatView:
        return cls(
            toolCallParser=chat.tool_parser,
            toolCallReason=chat.tool_reason,
            reasoningParser=chat.reasoning_parser,
            reasoningReason=chat.reasoning_reason,
        )


class FetchedView(View):
    """What a remote source was resolved to: the commit of a hub, and the digest of the files' contents."""

    revision: str
    digest: str
    sizeBytes: int

    @classmethod
    def of(cls, fetched: FetchedSource) -> FetchedView:
        return cls(revision=fetched.revision, digest=fetched.digest, sizeBytes=fetched.size_bytes)


class ModelView(View):
    """A registered model. `kind` is base, lora, boft, sparse_delta or svd_delta, null until it is known.

    `path` is the folder it was read from, as the server sees it. One with a `compression` is made here, of
    the fine-tune `source`; its `adapter` is what came out. `fetched`: its files came from a
    remote source. `tenant` is the owner; empty: the installation's.
    """

    model: str
    kind: str | None = None
    phase: str
    source: str | None
    base: str | None
    adapter: str | None
    path: str | None = None
    fetched: FetchedView | None = None
    compressionTechnique: dict[str, float]
    compression: CompressionView | None = None
    reason: str
    deployed: bool
    variants: list[str]
    weightBytes: int | None
    rank: int | None
    variant: VariantView | None = None
    evaluations: list[EvaluationView] = Field(default_factory=list)
    chat: ChatView | None = None
    createdAt: float
    tenant: str = ""

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
            fetched=FetchedView.of(m.fetched) if m.fetched else None,
            compressionTechnique=m.compression,
            compression=CompressionView.of(m.delta) if m.delta else None,
            reason=m.reason,
            deployed=deployed,
            variants=variants,
            weightBytes=known.weight_bytes if known else None,
            rank=(variant.max_rank or None) if variant else None,
            variant=VariantView.of(variant) if variant else None,
            evaluations=[EvaluationView.of(each) for each in m.evaluations],
            chat=ChatView.of(m.chat) if m.chat else None,
            createdAt=m.created_at_s,
            tenant=m.tenant,
        )


class TuneRequest(Strict):
    """A change of a base's deployment while it runs. At least one of the fields is given."""

    maxActiveVariants: int | None = Field(
        default=None,
        ge=1,
        le=1_000_000,
        description="Variants of this base that may run at once, from 1 to its slots.",
    )
    replicas: ReplicasChange | None = None
    targets: Targets | None = Field(
        default=None,
        description="Targets of a base or a variant. Only named fields change; null removes a target.",
    )
    placeAnew: bool | None = Field(
        default=None,
        description="Replace each serving engine by a new engine with room for the variants registered now. "
        "The old engines answer until the new engines serve. Sizes are chosen again.",
    )
    engine: EngineForm | None = Field(
        default=None,
        description="Replace the engines by engines of these sizes. A size of null is chosen again. A size "
        "that is left out stays as requested before.",
    )

    @model_validator(mode="after")
    def _something(self) -> TuneRequest:
        named = self.replicas is not None and self.replicas.model_fields_set
        retargeted = self.targets is not None and self.targets.model_fields_set
        resized = self.engine is not None and self.engine.model_fields_set
        given = named or retargeted or resized or self.placeAnew
        if self.maxActiveVariants is None and not given:
            raise ValueError(
                "expected at least one of maxActiveVariants, placeAnew, engine, replicas and targets; got "
                "none"
            )
        return self


class DeploymentView(View):
    """`groups` are a base's engines; `plan` is that of the first of them that serves.

    At most `maxActiveVariants` of a base's variants run at once; null: as many as it has slots. How many of
    those registered now its engine has memory for, `variantsAtOnce` says; null before it is placed.
    `toolCallParser` and `reasoningParser` are as it was deployed with; null: as the model's `chat` says.
    `engine` is how large its engines were asked to be; how large they are, `plan` says.

    `residency` says for each replica of the engine where variants are: all those of a base, or the described
    one. It is null in lists, and while the engine does not answer; `residencyReason` says why.
    """

    model: str
    phase: str
    host: str
    intent: str
    maxOutputLength: int | None
    SLOs: SloLimits
    load: LoadForm = Field(default_factory=LoadForm)
    tensorParallel: list[int] = Field(default_factory=list)
    pipelineParallel: list[int] = Field(default_factory=list)
    layersPerStage: list[int] = Field(default_factory=list)
    antiAffinity: AntiAffinity | None = None
    autoRelax: AutoRelax | None = None
    targets: Targets = Field(default_factory=Targets)
    engine: EngineForm = Field(default_factory=EngineForm)
    toolCallParser: str | None = None
    reasoningParser: str | None = None
    reason: str
    plan: PlanView | None
    replicas: Replicas | None = None
    groups: list[GroupView] = Field(default_factory=list)
    createdAt: float
    maxActiveVariants: int | None = None
    variantsAtOnce: VariantsAtOnceView | None = None
    residency: list[EngineResidencyView] | None = None
    residencyReason: str = ""

    @classmethod
    def of(cls, d: Deployment, at_once: AtOnce | None = None) -> DeploymentView:
        return cls(
            model=d.model,
            phase=d.phase,
            host=d.base,
            intent=d.intent,
            maxOutputLength=d.max_output_tokens,
            SLOs=SloLimits.of(d.slos),
            load=LoadForm.of(d.load),
            tensorParallel=list(d.constraints.tensor_parallel),
            pipelineParallel=list(d.constraints.pipeline_parallel),
            layersPerStage=list(d.constraints.layers_per_stage),
            antiAffinity=AntiAffinity.of(d.constraints),
            autoRelax=AutoRelax.of(d.auto_relax),
            targets=Targets.of(d.targets),
            engine=EngineForm.of(d.engine),
            toolCallParser=NO_PARSER if d.tool_parser == "" else d.tool_parser,
            reasoningParser=NO_PARSER if d.reasoning_parser == "" else d.reasoning_parser,
            reason=d.reason,
            plan=GroupView.of(d.base, d.leading).plan if d.leading else None,
            replicas=Replicas.of(d.scaling) if d.model == d.base else None,
            groups=[GroupView.of(d.base, group) for group in d.groups],
            createdAt=d.created_at_s,
            maxActiveVariants=d.max_active_variants,
            variantsAtOnce=VariantsAtOnceView.of(at_once),
        )


class ErrorDetail(View):
    message: str
    type: str
    param: str | None = None
    code: str
    details: dict[str, Any] | None = None


class ErrorBody(View):
    """The OpenAI error object; every endpoint answers errors with it."""

    error: ErrorDetail


class LoadLoraAdapterRequest(Strict):
    """The same as vLLM's. `base_model_name` may be left out while only one base is deployed."""

    lora_name: NewName
    lora_path: Uri
    base_model_name: Name | None = None
    load_inplace: Literal[False] = False


class UnloadLoraAdapterRequest(Strict):
    lora_name: Name
    lora_int_id: int | None = None
