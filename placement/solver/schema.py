"""The schema of a what-if file (docs/placement.md): checked here and converted to plain types."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator
from pydantic.alias_generators import to_camel
from pydantic_core import ErrorDetails

from placement.solver.cluster import Cluster, Gpu, GpuType, Node
from placement.solver.from_spec import figures_by_quantization, figures_of
from placement.solver.gpu_types import KNOWN
from placement.solver.request import Compression, ModelFigures, Request
from placement.types import CostMeasure, Intent, Scope, Slos
from profiler.architectures.registry import describe
from profiler.checkpoint import declared_dtype_bytes, spec_of
from profiler.errors import CheckpointError
from profiler.figures import figure
from profiler.files import read_json
from profiler.plans import quantization_names
from profiler.quantization import canonical
from profiler.shards import layer_share
from profiler.types import ModelSpec
from profiler.variants.types import VariantKind

GIB, MIB = 2**30, 2**20
BF16_BYTES = 2

MAX_GPUS = 100_000
MAX_REQUESTS = 10_000
MAX_LISTED = 8  # problems or names in one message
MAX_KV_BYTES = 2**60  # of a whole deployment
MAX_VARIANTS, MAX_RANK = 100_000, 512
SIZES = ("context", "slots", "lora_rank", "host_gib", "merged_slot", "variants")


def _a_number(value: Any) -> Any:
    if isinstance(value, bool):
        raise ValueError(f"expected a number, got {str(value).lower()}")
    return value


Number = Annotated[float, BeforeValidator(_a_number)]
Integer = Annotated[int, BeforeValidator(_a_number)]

# The largest bounds are a thousand times what is built today.
Rate = Annotated[Number, Field(ge=1e-3, le=1e9)]  # GB/s, TFLOPS
Gib = Annotated[Number, Field(ge=1e-3, le=1e6)]
Mib = Annotated[Number, Field(ge=0, le=1e6)]
LayerMib = Annotated[Number, Field(ge=1e-3, le=1e6)]
Limit = Annotated[Number, Field(ge=1e-9, le=1e12)]
Share = Annotated[Number, Field(ge=0, le=1)]
Count = Annotated[Integer, Field(ge=1, le=10_000_000)]
Degree = Annotated[Integer, Field(ge=1, le=1024)]
Layers = Annotated[Integer, Field(ge=1, le=10_000)]


class ScenarioError(ValueError):
    """An unusable what-if file: which field, what was expected, what was found."""


class _Form(BaseModel):
    """A form; names may be written like_this or likeThis, as in the API."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, alias_generator=to_camel, populate_by_name=True, loc_by_alias=False
    )


class TypeForm(_Form):
    """`shared`: a CPU host, whose ranks share its cores and memory."""

    memory_gb_per_s: Rate
    tflops: Rate
    shared: bool = False


class LinksForm(_Form):
    fast_gb_per_s: Rate = 100.0
    node_gb_per_s: Rate = 25.0
    network_gb_per_s: Rate = 12.5

    @model_validator(mode="after")
    def _nearer_is_faster(self) -> Self:
        speeds = (self.fast_gb_per_s, self.node_gb_per_s, self.network_gb_per_s)
        if list(speeds) != sorted(speeds, reverse=True):
            names = " >= ".join(LinksForm.model_fields)
            raise ValueError(f"expected {names}, got {', '.join(f'{speed:g}' for speed in speeds)}")
        return self


class GpuForm(_Form):
    """`count` equal GPUs; without `free_gib` all of their memory is free."""

    type: str
    count: Annotated[Integer, Field(ge=1, le=MAX_GPUS)] = 1
    total_gib: Gib
    free_gib: Annotated[Number, Field(ge=0, le=1e6)] | None = None
    load: Share = 0.0

    @model_validator(mode="after")
    def _no_more_free_than_there_is(self) -> Self:
        if self.free_gib is not None and self.free_gib > self.total_gib:
            raise ValueError(
                f"expected free_gib of at most total_gib ({self.total_gib:g}), got {self.free_gib:g}"
            )
        return self


class NodeForm(_Form):
    """`links`: groups of GPUs, by index, joined by fast links; other GPUs are joined by the node's link."""

    name: str
    gpus: tuple[GpuForm, ...]
    links: tuple[tuple[Integer, ...], ...] = ()


class ClusterForm(_Form):
    nodes: Annotated[tuple[NodeForm, ...], Field(min_length=1)]
    types: dict[str, TypeForm] = {}
    links: LinksForm = LinksForm()

    @model_validator(mode="after")
    def _not_too_many(self) -> Self:
        gpus = sum(gpu.count for node in self.nodes for gpu in node.gpus)
        if gpus > MAX_GPUS:
            raise ValueError(f"nodes: expected at most {MAX_GPUS} GPUs in all, got {gpus}")
        return self


class CompressionForm(_Form):
    """A layer's size: `layer_mib`, or as `share` of the uncompressed layer of a `config`."""

    accuracy: Share
    layer_mib: LayerMib | None = None
    share: Annotated[Number, Field(ge=1e-6, le=16)] | None = None


class ModelForm(_Form):
    """Either `config`, a path to a config.json or its folder, or every figure."""

    config: Path | None = None
    layers: Layers | None = None
    heads: Layers | None = None
    kv_heads: Layers | None = None
    hidden_size: Count | None = None
    dtype_bytes: Annotated[Integer, Field(ge=1, le=16)] = BF16_BYTES
    layer_mib: LayerMib | None = None
    kv_bytes_per_token_per_layer: Annotated[Number, Field(ge=0, le=1e9)] | None = None
    embedding_mib: Mib = 0.0
    head_mib: Mib = 0.0
    tied: bool = False
    tables_everywhere: bool = False
    layer_gflops_per_token: Rate | None = None
    overhead_mib: Mib = 1024.0
    last_overhead_mib: Mib = 0.0
    compressions: dict[str, CompressionForm] = {}

    @model_validator(mode="after")
    def _config_or_figures(self) -> Self:
        needed = ("layers", "heads", "kv_heads", "hidden_size", "layer_mib", "kv_bytes_per_token_per_layer")
        lacking = [name for name in needed if getattr(self, name) is None]
        if self.config is None and lacking:
            raise ValueError(
                f"expected config, or all figures of layers, got figures without {', '.join(lacking)}"
            )
        if self.config is not None and len(lacking) < len(needed):
            raise ValueError("expected either config or figures of layers, got both")
        return self


class LimitsForm(_Form):
    latency_s: Limit | None = None
    ttft_s: Limit | None = None
    tpot_s: Limit | None = None
    cost: Limit | None = None
    accuracy: Share | None = None


class VariantsForm(_Form):
    """`count` equal registered variants: LoRA adapters of a `rank` on all linear layers, or variants of
    another kind with `mib` of weights."""

    count: Annotated[Integer, Field(ge=1, le=MAX_VARIANTS)] = 1
    kind: VariantKind = VariantKind.LORA
    rank: Annotated[Integer, Field(ge=1, le=MAX_RANK)] | None = None
    mib: Annotated[Number, Field(gt=0, le=1e6)] | None = None

    @model_validator(mode="after")
    def _one_size(self) -> Self:
        wanted, other = ("rank", "mib") if self.kind is VariantKind.LORA else ("mib", "rank")
        if getattr(self, wanted) is None or getattr(self, other) is not None:
            raise ValueError(f"expected {wanted}, and no {other}, of variants of kind {self.kind}")
        return self


class DeploymentForm(_Form):
    """`copies` > 1 deploys NAME-1, NAME-2, ..., in one anti-affinity group unless `group` names another.

    `tp` and `pp` are the allowed degrees; empty: any up to `max_tp` and `max_pp`. The sizes of its engines
    (`SIZES`) that are left out are chosen, as when a model of that `config` is deployed. A model by figures
    has no sizes but `concurrency`.
    """

    name: str
    model: ModelForm
    copies: Annotated[Integer, Field(ge=1, le=MAX_REQUESTS)] = 1
    intent: Intent = Intent.MIN_COST
    cost: CostMeasure = CostMeasure.MEMORY_LATENCY
    slos: LimitsForm = LimitsForm()
    rate_per_s: Annotated[Number, Field(ge=0, le=1e9)] = 0.0
    input_tokens: Count = 512
    output_tokens: Count = 128
    concurrency: Annotated[Integer, Field(ge=1, le=1_000_000)] = 8
    context: Annotated[Integer, Field(ge=16, le=100_000_000)] | None = None
    slots: Annotated[Integer, Field(ge=1, le=1024)] | None = None
    lora_rank: Annotated[Integer, Field(ge=1, le=MAX_RANK)] | None = None
    host_gib: Annotated[Number, Field(ge=1e-3, le=1e6)] | None = None
    merged_slot: bool | None = None
    variants: Annotated[tuple[VariantsForm, ...], Field(max_length=1_000)] = ()
    tp: Annotated[tuple[Degree, ...], Field(max_length=64)] = ()
    pp: Annotated[tuple[Degree, ...], Field(max_length=64)] = ()
    max_tp: Degree = 8
    max_pp: Degree = 8
    headroom: Annotated[Number, Field(ge=0, lt=1)] = 0.0
    anti_affinity: Scope = Scope.NONE
    group: str = ""

    @model_validator(mode="after")
    def _sizes_of_a_config(self) -> Self:
        given = [name for name in SIZES if name in self.model_fields_set]
        if given and self.model.config is None:
            raise ValueError(f"expected model.config, which {', '.join(given)} needs")
        return self


class ScenarioForm(_Form):
    cluster: ClusterForm
    deployments: Annotated[tuple[DeploymentForm, ...], Field(min_length=1)]

    @model_validator(mode="after")
    def _not_too_many(self) -> Self:
        copies = sum(deployment.copies for deployment in self.deployments)
        if copies > MAX_REQUESTS:
            raise ValueError(f"deployments: expected at most {MAX_REQUESTS} copies in all, got {copies}")
        return self


def read_form(document: Any) -> ScenarioForm:
    """A parsed file, checked. Raises ScenarioError."""
    try:
        form = ScenarioForm.model_validate(document)
    except ValidationError as error:
        raise ScenarioError(problems(error)) from error
    names = [name for deployment in form.deployments for name in names_of(deployment)]
    twice = sorted(name for name, count in Counter(names).items() if count > 1)
    if twice:
        raise ScenarioError(
            f"deployments: {_listed(twice)} is named twice; give each deployment its own name"
        )
    return form


def read_scenario(document: Any, folder: Path) -> tuple[Cluster, tuple[Request, ...]]:
    """The cluster and requests of a parsed file; its paths are relative to `folder`. Raises ScenarioError."""
    return scenario_of(read_form(document), folder)


def scenario_of(form: ScenarioForm, folder: Path) -> tuple[Cluster, tuple[Request, ...]]:
    """The cluster and requests of a file; its paths are relative to `folder`. Raises ScenarioError."""
    try:
        requests = [request for deployment in form.deployments for request in _requests(deployment, folder)]
        return _cluster(form.cluster), tuple(requests)
    except CheckpointError as error:
        raise ScenarioError(f"model config: {error}") from error
    except ScenarioError:
        raise
    except ValueError as error:  # raised by the plain types
        raise ScenarioError(str(error)) from error


def names_of(form: DeploymentForm) -> list[str]:
    """The name of each copy."""
    return [form.name] if form.copies == 1 else [f"{form.name}-{n}" for n in range(1, form.copies + 1)]


def _cluster(form: ClusterForm) -> Cluster:
    types = dict(KNOWN) | {
        name: GpuType(name, rates.memory_gb_per_s * 1e9, rates.tflops * 1e12, rates.shared)
        for name, rates in form.types.items()
    }
    nodes = tuple(_node(node) for node in form.nodes)
    used = {gpu.type for node in nodes for gpu in node.gpus}
    unknown = sorted(used - set(types))
    if unknown:
        raise ScenarioError(
            f"cluster: unknown GPU type {_listed(unknown)}; use one of {', '.join(sorted(KNOWN))}, "
            "or give the type's memory_gb_per_s and tflops under cluster.types"
        )
    if len({types[name].shared for name in used}) > 1:
        raise ScenarioError(
            f"cluster: {_listed(sorted(name for name in used if types[name].shared))} is shared "
            "(cluster.types), but other types are not; describe CPU hosts and GPUs in separate files"
        )
    links = form.links
    bandwidths = (links.fast_gb_per_s * 1e9, links.node_gb_per_s * 1e9, links.network_gb_per_s * 1e9)
    try:
        return Cluster(nodes, tuple(types[name] for name in sorted(used)), bandwidths)
    except ValueError as error:
        raise ScenarioError(f"cluster.nodes: {error}") from error


def _node(form: NodeForm) -> Node:
    listed = [gpu for gpu in form.gpus for _ in range(gpu.count)]
    domain_of = {index: number for number, indices in enumerate(form.links) for index in indices}
    named = sum(len(indices) for indices in form.links)
    if named != len(domain_of) or not set(domain_of) <= set(range(len(listed))):
        raise ScenarioError(
            f"cluster.nodes.{form.name}.links: expected indices 0 to {len(listed) - 1}, each once, "
            f"got {_listed(str(list(indices)) for indices in form.links)}"
        )
    gpus = tuple(
        Gpu(
            index=index,
            type=gpu.type,
            total_bytes=round(gpu.total_gib * GIB),
            free_bytes=round((gpu.total_gib if gpu.free_gib is None else gpu.free_gib) * GIB),
            load=gpu.load,
            nvlink_domain=domain_of.get(index, len(form.links) + index),
        )
        for index, gpu in enumerate(listed)
    )
    return Node(form.name, gpus)


def _requests(form: DeploymentForm, folder: Path) -> list[Request]:
    model = _from_config(form, folder) if form.model.config else _from_figures(form.name, form.model)
    tokens = form.concurrency * (form.input_tokens + form.output_tokens)
    kv_bytes = model.layers * tokens * max(c.kv_bytes_per_token for c in model.compressions)
    if kv_bytes > MAX_KV_BYTES:
        raise ScenarioError(
            f"{form.name}: expected at most {figure(MAX_KV_BYTES)} bytes of KV cache, but concurrency x "
            f"(input_tokens + output_tokens) x layers need {figure(kv_bytes)}; lower one of them"
        )
    return [
        Request(
            name=name,
            model=model,
            intent=form.intent,
            cost=form.cost,
            slos=Slos(**form.slos.model_dump()),
            rate_per_s=form.rate_per_s,
            input_tokens=form.input_tokens,
            output_tokens=form.output_tokens,
            concurrency=form.concurrency,
            max_tp=max(form.max_tp, *form.tp, 1),
            max_pp=max(form.max_pp, *form.pp, 1),
            only_tp=form.tp,
            only_pp=form.pp,
            headroom=form.headroom,
            group=group_of(form),
            scope=form.anti_affinity,
        )
        for name in names_of(form)
    ]


def group_of(form: DeploymentForm) -> str:
    """The anti-affinity group; copies have their own."""
    return form.group or (form.name if form.anti_affinity is not Scope.NONE else "")


def _from_config(form: DeploymentForm, folder: Path) -> ModelFigures:
    path = folder / (form.model.config or "")
    path = path / "config.json" if path.is_dir() else path
    try:
        raw = read_json(path)
    except CheckpointError as error:
        raise ScenarioError(f"{form.name}: expected a config.json at {path}: {error}") from error
    spec = spec_of(describe(raw, path), declared_dtype_bytes(raw, path) or BF16_BYTES)
    given = {canonical(name): compression for name, compression in form.model.compressions.items()}
    sized = any(compression.layer_mib or compression.share for compression in given.values())
    if not sized and given.keys() == set(quantization_names(dict.fromkeys(given, 0.0), spec)):
        return figures_by_quantization(
            form.name, spec, {name: compression.accuracy for name, compression in given.items()}
        )
    shares = {
        name: (compression.accuracy, _share(name, compression, spec)) for name, compression in given.items()
    }
    return figures_of(form.name, spec, shares)


def _share(name: str, form: CompressionForm, spec: ModelSpec) -> float:
    """A compressed layer's bytes as a share of the uncompressed layer's. If the file gives neither size nor
    share, the share of the quantization with this name is used."""
    if form.layer_mib:
        return form.layer_mib * MIB / spec.layer_weight_bytes
    return form.share or layer_share(spec, 1, name)


def _from_figures(name: str, form: ModelForm) -> ModelFigures:
    layer_bytes = (form.layer_mib or 0) * MIB
    kv_bytes = round(form.kv_bytes_per_token_per_layer or 0)
    given = form.compressions or {"none": CompressionForm(accuracy=1.0)}
    compressions = tuple(
        Compression(
            kind,
            compression.accuracy,
            round(
                compression.layer_mib * MIB
                if compression.layer_mib
                else (compression.share or 1.0) * layer_bytes
            ),
            kv_bytes,
        )
        for kind, compression in given.items()
    )
    flops = form.layer_gflops_per_token
    return ModelFigures(
        name=name,
        layers=form.layers or 0,
        heads=form.heads or 0,
        kv_heads=form.kv_heads or 0,
        embedding_bytes=round(form.embedding_mib * MIB),
        head_bytes=round(form.head_mib * MIB),
        hidden_bytes=(form.hidden_size or 0) * form.dtype_bytes,
        layer_flops=flops * 1e9 if flops else 2 * layer_bytes / form.dtype_bytes,
        overhead_bytes=round(form.overhead_mib * MIB),
        compressions=compressions,
        tied=form.tied,
        tables_everywhere=form.tables_everywhere,
        last_overhead_bytes=round(form.last_overhead_mib * MIB),
    )


def problems(error: ValidationError) -> str:
    """The message about all wrong fields; a list with a wrong entry is not also reported as too short."""
    errors = error.errors(include_url=False)
    wrong = [(problem["loc"], _said(problem)) for problem in errors if problem["type"] != "too_short"]
    short = [(problem["loc"], _said(problem)) for problem in errors if problem["type"] == "too_short"]
    wrong += [(loc, said) for loc, said in short if not any(within[: len(loc)] == loc for within, _ in wrong)]
    named = [(".".join(map(str, loc)), said) for loc, said in wrong]
    return _listed((f"{field}: {said}" if field else said for field, said in named), ", and ")


def _said(problem: ErrorDetails) -> str:
    """The error of a field. For a field that contains fields, pydantic's message would name our class."""
    if problem["type"] == "model_type":
        given = problem["input"]
        fields = "its fields" if problem["loc"] else "cluster and deployments"
        return f"expected {fields}, got {'nothing' if given is None else type(given).__name__}"
    return problem["msg"].removeprefix("Value error, ")


def _listed(texts: Iterable[str], between: str = ", ") -> str:
    """The first texts, and the number of the others."""
    every = list(texts)
    more = [f"{len(every) - MAX_LISTED} more"] if len(every) > MAX_LISTED else []
    return between.join([*every[:MAX_LISTED], *more])
