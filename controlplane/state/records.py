"""What the state store remembers: models, profiles, deployments, reservations, operations, keys.

A field with an alias is stored under that name: it is the one of an earlier version, whose stores must open.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated, Any, TypeVar

from pydantic import BeforeValidator, Field, TypeAdapter, model_validator

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
    """A figure of one task, as `profiler.evaluation.results.Result` has it. An end of None is unbounded."""

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
        """What it is the figure of: a newer one takes its place."""
        return self.task, self.metric, self.reference


@dataclass(frozen=True)
class Model:
    """A registered base (`source`) or variant (`base` + `adapter`); `path` is its folder once Ready.

    A variant with a `delta` is made here, of the fine-tune `source`; its `adapter` is what came out.
    `uid` is unique for ever, so that a name registered again never meets its predecessor's caches.
    `compression` maps each allowed technique to its accuracy (MaverIQ Table 1). `profile` is the key of the
    ModelProfile that its plans are estimated from. `evaluations` has one of each subject, the newest last.
    `tenant` is whose it is, "" the installation's: then all may use it. `max_host_bytes` is what the variants
    of its tenant may hold in all, as it was when this one was registered; None: any.
    `reads`: how often its files were begun to be read without an end. `chat` is how it writes tool
    calls and reasoning; None: it was read before that was looked at.
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

    @property
    def is_variant(self) -> bool:
        return self.base is not None


def _known_intent(value: Any) -> Any:
    """Older records say "slo" where only limits were given: least cost within them."""
    return Intent.MIN_COST if value == "slo" else value


def _renamed_cost(value: Any) -> Any:
    """Older records name the unit of the one cost there was."""
    if isinstance(value, dict) and "cost_gib_s" in value:
        kept = {name: amount for name, amount in value.items() if name != "cost_gib_s"}
        return {"cost": value["cost_gib_s"]} | kept
    return value


@dataclass(frozen=True)
class ExpectedLoad:
    """Requests that come each second, and their lengths; None: what the installation assumes."""

    rate_per_s: float = 0.0
    input_tokens: int | None = None
    output_tokens: int | None = None


@dataclass(frozen=True)
class PlanConstraints:
    """What a plan must keep beside SLOs. Empty: any degree of parallelism, any split of layers.

    Deployments of one anti-affinity `group` share no GPU or no node, as `scope` says.
    """

    tensor_parallel: tuple[int, ...] = ()
    pipeline_parallel: tuple[int, ...] = ()
    layers_per_stage: tuple[int, ...] = ()
    group: str = ""
    scope: Scope = Scope.NONE


@dataclass(frozen=True)
class AutoRelax:
    """Whether the nearest relaxation may be applied when nothing fits, and up to which factor."""

    allowed: bool = False
    max_factor: Annotated[float | None, Field(alias="most_factor")] = None


@dataclass(frozen=True)
class Scaling:
    """How many groups a base's deployment has: from `min_groups` to `max_groups`, as the load asks.

    One is added while more than `target_in_flight` requests are under way for each (None: as many as an
    engine takes at once). With `min_groups` 0 the last one goes after `idle_s` without a request.
    """

    min_groups: Annotated[int, Field(alias="least")] = 1
    max_groups: Annotated[int, Field(alias="most")] = 1
    target_in_flight: float | None = None
    idle_s: float = 300.0


@dataclass(frozen=True)
class ServingTargets:
    """What requests are served by, unless they say otherwise themselves. None: no target of its own.

    `ttft_s` to the first token, `tpot_s` for each further one, `deadline_s` for the whole answer, all from
    the request's arrival at a gateway.
    """

    ttft_s: float | None = None
    tpot_s: float | None = None
    deadline_s: float | None = None
    priority: Priority | None = None
    late: LatePolicy | None = None


@dataclass(frozen=True)
class Attempts:
    """Attempts that failed in a row, the first one at `since_s` and the last one for `reason`. The next one
    begins at `retry_at_s`."""

    failures: int = 0
    since_s: float = 0.0
    retry_at_s: float = 0.0
    reason: str = ""


@dataclass(frozen=True)
class Deployment:
    """A desired deployment and what became of it. `host` is the base whose engines serve it.

    Those of a base are its `groups`; a variant has none of its own. Once `established` (it was Deployed),
    only its user ends it: a group that is lost is placed anew.
    `max_active_variants` of a base is how many of its variants may run at once; None: as many as have slots.
    `kind` is that of the devices its first group was placed on, which those added later are for.
    `loading` of a variant is how bringing it into its base's engines went so far.
    An answer has at most `max_output_tokens`; None: as many as the context has room for.
    `slos` are limits that a plan is chosen by, `targets` what its requests are served by. `tool_parser` and
    `reasoning_parser` of a base read its answers; None: as its `chat` says, "": none does. `engine` is how
    large a base's engines were asked to be, `chosen` how large they were made when the first was placed;
    engines that are placed later are the same.
    """

    model: str
    uid: int
    host: str
    phase: Phase
    intent: Annotated[Intent, BeforeValidator(_known_intent)]
    max_output_tokens: int | None
    slos: Annotated[Slos, BeforeValidator(_renamed_cost)] = field(default_factory=Slos)
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
        """Older records have one placement, that of the one engine there was; or no sizes of engines."""
        if not isinstance(value, dict):
            return value
        grouped = value if "groups" in value else _with_one_group(value)
        return grouped if "chosen" in grouped else grouped | {"chosen": _sizes_before(grouped)}

    @property
    def leading(self) -> WorkerGroup | None:
        """The group that stands for all where one is shown: the first that serves, or is placed."""
        placed = [group for group in self.groups if group.placement is not None]
        serving = [group for group in placed if group.phase is GroupPhase.SERVING]
        return next(iter([*serving, *placed]), None)

    @property
    def placement(self) -> Placement | None:
        return self.leading.placement if self.leading else None

    @property
    def device_kind(self) -> str:
        """Empty when none of its groups was placed yet. Older records have it in their groups only."""
        return self.kind or next((group.device_kind for group in self.groups if group.device_kind), "")

    def group(self, number: int) -> WorkerGroup | None:
        return next((group for group in self.groups if group.number == number), None)

    def group_ids(self) -> tuple[str, ...]:
        return tuple(group_id_of(self.host, group.number) for group in self.groups)

    def serving_ids(self) -> tuple[str, ...]:
        serving = (group.number for group in self.groups if group.phase is GroupPhase.SERVING)
        return tuple(group_id_of(self.host, number) for number in serving)


def _with_one_group(old: dict[str, Any]) -> dict[str, Any]:
    parts = ("placement", "measured", "memory_excess")
    parts_of_group = {name: old[name] for name in parts if name in old}
    kept = {name: value for name, value in old.items() if name not in parts}
    if old.get("host") != old.get("model"):
        return kept
    phase = GroupPhase.PENDING
    if parts_of_group.get("placement") is not None:
        phase = GroupPhase.SERVING if old.get("phase") == Phase.DEPLOYED else GroupPhase.STARTING
    return kept | {"groups": [parts_of_group | {"number": 0, "phase": phase}]}


def _sizes_before(old: dict[str, Any]) -> dict[str, Any] | None:
    """Of the engines that an older record has placed; None where it has none."""
    try:
        plan = next(group["placement"]["plan"] for group in old["groups"] if group.get("placement"))
        context, cached = plan["max_model_len"], plan["kv_cache_tokens"]
        requests = max(1, cached // context)
        slots, rank = plan["max_variants"], plan["max_lora_rank"]
    except (StopIteration, LookupError, TypeError, AttributeError, ZeroDivisionError):
        return None  # none is placed, or the record cannot be read, which its validation says
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
    """What was measured of an architecture on a kind of device; shared by all models of its shape.

    `measurements` are lines as of `profiler.measurements`, each kept as soon as it was made. `points` of
    the plan's `all_points` loads are among them. `phase` is Pending, Profiling, or final: Ready (perhaps
    with less than was planned, which `reason` says), Failed, Cancelled. `attempts` that brought nothing new;
    `rounds`: how often it was begun afresh. `memory_excess` is what ranks of a shape ("2x1": TP x PP) were
    found to take beyond their estimate. `forms` are those to be measured beside the uncompressed one.
    `busy` is the share of the device's time that other work took meanwhile, as a mean; None: not known.
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
    """What the request path was found to take in a cluster that is set up as `key` says.

    Without a `path` it was not measured yet: `failed` says how often that was tried, and why it failed.
    """

    key: str
    path: RequestPath | None = None
    failed: Attempts = field(default_factory=Attempts)
    measured_at_s: float = 0.0


@dataclass(frozen=True)
class Reservation:
    """Bytes of a device for one rank of `holder`: a worker group of the deployment with this `uid`; as
    `measuring:KEY`, what is measured for the profile of this key in the round `uid`; or, as
    `compressing:NAME`, what makes the delta of the model with this `uid`."""

    holder: str
    uid: int
    rank: int
    kind: str
    index: int
    memory_bytes: int
    since_s: float


@dataclass(frozen=True)
class NodeLedger:
    """What is promised of a node's devices; without promises there is no such record."""

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
    """Who asked for something: a tenant, and the first 8 hexadecimal digits of its key's SHA-256."""

    tenant: str
    role: Role
    key: str = ""


@dataclass(frozen=True)
class Operation:
    """A long-running request. `progress` is 0..1; `error` is an OpenAI error object when it failed.

    `tenant` is that of the model that it is about. `asked_by` is None in older records.
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
    answer: Operation | None = None  # an earlier version's, of a `PastOperation`


@dataclass(frozen=True)
class PastOperation:
    """An operation as it ended, without its events: what is kept of it for who repeats its request."""

    id: str
    operation: Operation


@dataclass(frozen=True)
class TenantChanges:
    """How often a tenant with quotas registered or deployed something. Each such commit raises it, so that of
    two at once one decides anew, by what the other made."""

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

# To be raised with a change that older software would misread. It ignores fields that it does not know.
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
    """Made at first use: a client has the records' types, but reads and writes none."""
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
    """JSON, whose first field says what must be understood to read it."""
    fields = _adapter(type(record)).dump_json(record, by_alias=True).decode()
    return f'{{"schema":{SCHEMA},{fields[1:]}'


def load(cls: type[R], text: str) -> R:
    """Errors: ValueError, for what is no such record, and for one that newer software wrote for itself."""
    schema = _SCHEMA.match(text)  # none: of before there were any
    if schema is not None and int(schema[1]) > SCHEMA:
        raise ValueError(f"its schema is {schema[1]}, and this version reads up to {SCHEMA}")
    record: R = _adapter(cls).validate_json(text)
    return record
