"""The records in the state store: models, profiles, deployments, reservations, operations, keys.

A field with an alias is stored under that name, which is that of an earlier version: old stores must open.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated, Any, TypeVar

from pydantic import Field, TypeAdapter, model_validator

from controlplane.state.deltas import Delta
from controlplane.state.terms import FINAL_PHASES, LatePolicy, Phase, Priority, Role
from controlplane.state.worker_groups import GroupPhase, WorkerGroup, group_id_of
from placement.types import EngineSizes, Intent, Placement, Scope, Slos
from profiler.chat_format import ChatFormat
from profiler.request_path import RequestPath
from profiler.types import ModelSpec
from profiler.variants.types import VariantSpec

__all__ = [
    "KINDS",
    "Asker",
    "Attempts",
    "AutoRelax",
    "Deployment",
    "Evaluation",
    "ExpectedLoad",
    "FetchedSource",
    "IdempotencyKey",
    "Model",
    "ModelProfile",
    "NodeLedger",
    "Operation",
    "OperationEvent",
    "OperationKind",
    "PastOperation",
    "PathProfile",
    "Phase",
    "PlanConstraints",
    "R",
    "Record",
    "Reservation",
    "Scaling",
    "ServingTargets",
    "TenantChanges",
    "dump",
    "key_of",
    "load",
]


@dataclass(frozen=True)
class Evaluation:
    """A figure of one task, as in `profiler.evaluation.results.Result`. A bound of None is infinite."""

    task: str
    metric: str
    value: float
    items: int
    low: float | None = None
    high: float | None = None
    tokens: int = 0
    reference: str = ""
    coverage: float = 1.0
    digest: str = ""
    measured_at_s: float = 0.0

    @property
    def subject(self) -> tuple[str, str, str]:
        """The subject of the figure: a newer figure of the same subject replaces it."""
        return self.task, self.metric, self.reference


@dataclass(frozen=True)
class FetchedSource:
    """The files of `uri`, in `folder` of each node that needs them. `revision` is the commit on a hub;
    `digest` is that of their contents."""

    uri: str
    folder: str
    revision: str
    digest: str
    size_bytes: int


@dataclass(frozen=True)
class Model:
    """A registered base (`source`) or variant (`base` + `adapter`); `path` is its folder once Ready.

    A variant with a `delta` is made here from the fine-tune `source`; its `adapter` is the result. `uid` is
    never used again, so that a name that is registered again never meets its predecessor's caches.
    `compression` maps each allowed technique to its accuracy (MaverIQ Table 1). `profile` is the key of the
    ModelProfile for estimates of its plans. `evaluations` has one figure of each subject, the newest last.
    `tenant` owns it; "": the installation, whose models all may use. `max_host_bytes` is the quota for all
    variants of its tenant, at the time of registration; None: any. `reads`: how many readings of its files
    began and did not end. `chat` is its format of tool calls and reasoning; None: it was read by an earlier
    version without that. `fetched`: its files came from a remote source.
    """

    name: str
    uid: int
    phase: Phase
    source: str | None = None
    base: str | None = None
    adapter: str | None = None
    path: str | None = None
    compression: dict[str, float] = field(default_factory=dict)
    spec: ModelSpec | None = None
    variant_spec: VariantSpec | None = None
    reason: str = ""
    created_at_s: float = 0.0
    profile: str | None = None
    delta: Delta | None = None
    evaluations: tuple[Evaluation, ...] = ()
    tenant: str = ""
    max_host_bytes: int | None = None
    reads: int = 0
    chat: ChatFormat | None = None
    fetched: FetchedSource | None = None

    @property
    def is_variant(self) -> bool:
        return self.base is not None


@dataclass(frozen=True)
class ExpectedLoad:
    """Requests that come each second, and their lengths; None: the installation's defaults."""

    rate_per_s: float = 0.0
    input_tokens: int | None = None
    output_tokens: int | None = None


@dataclass(frozen=True)
class PlanConstraints:
    """Constraints of a plan in addition to SLOs. Empty: any degree of parallelism, any split of layers.

    Deployments of one anti-affinity `group` share no GPU or no node, as `scope` says.
    """

    tensor_parallel: tuple[int, ...] = ()
    pipeline_parallel: tuple[int, ...] = ()
    layers_per_stage: tuple[int, ...] = ()
    group: str = ""
    scope: Scope = Scope.NONE


@dataclass(frozen=True)
class AutoRelax:
    """Whether the nearest relaxation may be applied if nothing fits, and up to which factor."""

    allowed: bool = False
    max_factor: Annotated[float | None, Field(alias="most_factor")] = None


@dataclass(frozen=True)
class Scaling:
    """The number of groups of a base's deployment: from `min_groups` to `max_groups`, depending on load.

    A group is added while more than `target_in_flight` requests are under way for each group (None: as many
    as an engine takes at once). With `min_groups` 0 the last group is removed after `idle_s` without a
    request.
    """

    min_groups: Annotated[int, Field(alias="least")] = 1
    max_groups: Annotated[int, Field(alias="most")] = 1
    target_in_flight: float | None = None
    idle_s: float = 300.0


@dataclass(frozen=True)
class ServingTargets:
    """Targets of requests that do not set their own. None: no target.

    `ttft_s` to the first token, `tpot_s` for each further token, `deadline_s` for the whole answer, all from
    the request's arrival at a gateway.
    """

    ttft_s: float | None = None
    tpot_s: float | None = None
    deadline_s: float | None = None
    priority: Priority | None = None
    late: LatePolicy | None = None


@dataclass(frozen=True)
class Attempts:
    """Attempts that failed in a row, the first at `since_s`, the last for `reason`. The next attempt begins
    at `retry_at_s`."""

    failures: int = 0
    since_s: float = 0.0
    retry_at_s: float = 0.0
    reason: str = ""


@dataclass(frozen=True)
class Deployment:
    """A desired deployment and its state. `base` is the model whose engines serve it: its base, or itself.

    A base has its `groups`; a variant has none of its own. Once `established` (it was Deployed), only its
    user ends it: a lost group is placed again. At most `max_active_variants` of a base's variants run at
    once; None: as many as it has slots. `kind` is the kind of the devices of its first group; groups that are
    added later use the same kind. `loading` of a variant is the state of loading it into its base's engines.
    An answer has at most `max_output_tokens`; None: as many as the context has room for. `slos` are limits
    for the choice of a plan, `targets` the targets of its requests. `tool_parser` and `reasoning_parser` of a
    base parse its answers; None: the parsers of its `chat`, "": no parser. `engine` are the requested sizes
    of a base's engines, `chosen` the sizes chosen when the first engine was placed; later engines have the
    same sizes.
    """

    model: str
    uid: int
    base: Annotated[str, Field(alias="host")]
    phase: Phase
    intent: Intent
    max_output_tokens: int | None
    slos: Slos = field(default_factory=Slos)
    reason: str = ""
    created_at_s: float = 0.0
    established: bool = False
    max_active_variants: int | None = None
    load: ExpectedLoad = field(default_factory=ExpectedLoad)
    constraints: Annotated[PlanConstraints, Field(alias="bounds")] = field(default_factory=PlanConstraints)
    auto_relax: Annotated[AutoRelax, Field(alias="relaxing")] = field(default_factory=AutoRelax)
    scaling: Scaling = field(default_factory=Scaling)
    groups: tuple[WorkerGroup, ...] = ()
    kind: str = ""
    loading: Attempts = field(default_factory=Attempts)
    targets: ServingTargets = field(default_factory=ServingTargets)
    tool_parser: str | None = None
    reasoning_parser: str | None = None
    engine: EngineSizes = field(default_factory=EngineSizes)
    chosen: EngineSizes | None = None

    @model_validator(mode="before")
    @classmethod
    def _of_older(cls, value: Any) -> Any:
        """Older records have no sizes of engines."""
        if not isinstance(value, dict) or "chosen" in value:
            return value
        return value | {"chosen": _sizes_before(value)}

    @property
    def leading(self) -> WorkerGroup | None:
        """The group that represents all groups: the first that serves, or else the first that is placed."""
        placed = [group for group in self.groups if group.placement is not None]
        serving = [group for group in placed if group.phase is GroupPhase.SERVING]
        return next(iter([*serving, *placed]), None)

    @property
    def placement(self) -> Placement | None:
        return self.leading.placement if self.leading else None

    @property
    def device_kind(self) -> str:
        """The kind of its devices; empty if no group was placed yet. Older records have it only in their
        groups."""
        return self.kind or next((group.device_kind for group in self.groups if group.device_kind), "")

    def group(self, number: int) -> WorkerGroup | None:
        return next((group for group in self.groups if group.number == number), None)

    def group_ids(self) -> tuple[str, ...]:
        return tuple(group_id_of(self.base, group.number) for group in self.groups)

    def serving_ids(self) -> tuple[str, ...]:
        serving = (group.number for group in self.groups if group.phase is GroupPhase.SERVING)
        return tuple(group_id_of(self.base, number) for number in serving)


def _sizes_before(old: dict[str, Any]) -> dict[str, Any] | None:
    """The sizes of the engines that an older record has placed; None if there are none."""
    try:
        plan = next(group["placement"]["plan"] for group in old["groups"] if group.get("placement"))
        context, cached = plan["max_model_len"], plan["kv_cache_tokens"]
        requests = max(1, cached // context)
        slots, rank = plan["max_variants"], plan["max_lora_rank"]
    except (StopIteration, LookupError, TypeError, AttributeError, ZeroDivisionError):
        return None  # no engine is placed, or the record is unreadable, which its validation reports
    return {
        "context_tokens": context,
        "requests_at_once": requests,
        "cached_tokens": cached,
        "variant_slots": slots,
        "lora_rank": rank,
        "merged_slot": plan.get("merged_slot", False),
    }


@dataclass(frozen=True)
class ModelProfile:
    """Measurements of an architecture on a kind of device; shared by all models of its shape.

    `measurements` are lines as in `profiler.measurements`, each kept as soon as it was made. They include
    `points` of the plan's `all_points` loads. `phase` is Pending, Profiling, or final: Ready (perhaps with
    less than was planned; see `reason`), Failed, Cancelled. `attempts`: those without new measurements;
    `rounds`: how often profiling began from the start. `memory_excess` is what ranks of a shape ("2x1": TP x
    PP) took beyond their estimate. `forms` are the quantizations to be measured in addition to the
    uncompressed one. `busy` is the mean share of the device's time that other work took meanwhile; None:
    unknown.
    """

    key: str
    architecture: str
    dtype: str
    device: str
    engine_version: str
    phase: Phase
    measurements: tuple[str, ...] = ()
    points: int = 0
    all_points: int = 0
    seconds: float = 0.0
    attempts: int = 0
    rounds: int = 0
    reason: str = ""
    created_at_s: float = 0.0
    updated_at_s: float = 0.0
    memory_excess: dict[str, int] = field(default_factory=dict)
    forms: tuple[str, ...] = ()
    busy: float | None = None

    @property
    def settled(self) -> bool:
        return self.phase in FINAL_PHASES


@dataclass(frozen=True)
class PathProfile:
    """The measured request path of a cluster with the setup in `key`.

    Without a `path` it was not measured yet: `failed` counts the failed attempts, with their reason.
    """

    key: str
    path: RequestPath | None = None
    failed: Attempts = field(default_factory=Attempts)
    measured_at_s: float = 0.0


@dataclass(frozen=True)
class Reservation:
    """Bytes of a device for one rank of `holder`. It is a worker group of the deployment with this `uid`. Or
    it is `measuring:KEY`, a measurement for the profile of this key in the round `uid`. Or it is
    `compressing:NAME`, which makes the delta of the model with this `uid`."""

    holder: str
    uid: int
    rank: int
    kind: str
    index: int
    memory_bytes: int
    since_s: float


@dataclass(frozen=True)
class NodeLedger:
    """Reservations of a node's devices; a node without reservations has no such record."""

    node: str
    reservations: tuple[Reservation, ...]


class OperationKind(StrEnum):
    REGISTER = "register_model"
    DEPLOY = "deploy_model"
    UNDEPLOY = "undeploy_model"
    DELETE = "delete_model"
    PROFILE = "profile_model"


@dataclass(frozen=True)
class OperationEvent:
    at_s: float
    phase: Phase
    message: str


@dataclass(frozen=True)
class Asker:
    """The client that asked for something: a tenant, and the first 8 hex digits of its key's SHA-256."""

    tenant: str
    role: Role
    key: str = ""


@dataclass(frozen=True)
class Operation:
    """A long-running request. `progress` is 0..1; `error` is an OpenAI error object when it failed.

    `tenant` is the owner of the model in `target`. `asked_by` is None in older records.
    """

    id: str
    kind: OperationKind
    target: str
    phase: Phase
    progress: float = 0.0
    reason: str = ""
    error: dict[str, Any] | None = None
    cancel_requested: bool = False
    created_at_s: float = 0.0
    updated_at_s: float = 0.0
    events: tuple[OperationEvent, ...] = ()
    tenant: str = ""
    asked_by: Asker | None = None

    @property
    def done(self) -> bool:
        return self.phase in FINAL_PHASES


@dataclass(frozen=True)
class IdempotencyKey:
    key: str
    request_sha256: str
    operation_id: str
    created_at_s: float


@dataclass(frozen=True)
class PastOperation:
    """An operation after its end, without its events, kept for clients that repeat its request."""

    id: str
    operation: Operation


@dataclass(frozen=True)
class TenantChanges:
    """How often a tenant with quotas registered or deployed something. Each such commit raises the number. So
    of two at the same time one decides again, with the result of the other."""

    tenant: str
    number: int = 0


Record = (
    Model
    | Deployment
    | Operation
    | IdempotencyKey
    | PastOperation
    | ModelProfile
    | NodeLedger
    | PathProfile
    | TenantChanges
)
R = TypeVar(
    "R",
    Model,
    Deployment,
    Operation,
    IdempotencyKey,
    PastOperation,
    ModelProfile,
    NodeLedger,
    PathProfile,
    TenantChanges,
)

# To be raised with a change that older software would misread. Older software ignores unknown fields.
SCHEMA = 1
_SCHEMA = re.compile(r'\{"schema":(\d{1,9}),')

KINDS: dict[type[Any], str] = {
    Model: "model",
    Deployment: "deployment",
    Operation: "operation",
    IdempotencyKey: "idempotency",
    PastOperation: "past_operation",
    ModelProfile: "profile",
    NodeLedger: "ledger",
    PathProfile: "path",
    TenantChanges: "tenant_changes",
}


_ADAPTERS: dict[type[Any], TypeAdapter[Any]] = {}


def _adapter(cls: type[Any]) -> TypeAdapter[Any]:
    """The adapter of a class, made at first use: clients have the types, but read and write no records."""
    if cls not in _ADAPTERS:
        _ADAPTERS[cls] = TypeAdapter(cls)
    return _ADAPTERS[cls]


def key_of(record: Record) -> str:
    match record:
        case Model(name=key) | Deployment(model=key) | Operation(id=key) | PastOperation(id=key):
            return key
        case (
            TenantChanges(tenant=key)
            | IdempotencyKey(key=key)
            | ModelProfile(key=key)
            | NodeLedger(node=key)
            | PathProfile(key=key)
        ):
            return key


def dump(record: Record) -> str:
    """The record as JSON; its first field is the schema that a reader must support."""
    fields = _adapter(type(record)).dump_json(record, by_alias=True).decode()
    return f'{{"schema":{SCHEMA},{fields[1:]}'


def load(cls: type[R], text: str) -> R:
    """Parse a record. Errors: ValueError if the text is no such record, or if newer software wrote it."""
    schema = _SCHEMA.match(text)  # None: from before there were schemas
    if schema is not None and int(schema[1]) > SCHEMA:
        raise ValueError(f"its schema is {schema[1]}, but this version reads schemas up to {SCHEMA}")
    record: R = _adapter(cls).validate_json(text)
    return record
