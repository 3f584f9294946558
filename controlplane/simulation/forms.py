"""The schema of a scenario file (docs/simulation.md): its fields and their bounds."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator
from pydantic.alias_generators import to_camel

from controlplane.baselines.routing.choose import POLICIES
from controlplane.state.terms import LatePolicy, Priority
from placement.solver.schema import Integer, Number, ScenarioError
from placement.types import Intent
from profiler.step_time.records import MAX_ROWS, RANK_CLASSES
from profiler.variants.types import VariantKind

MAX_GROUPS = 2_000
MAX_VARIANTS = 1_000_000
MAX_PLACES = 20_000_000  # groups x variants: each takes 40 bytes
MAX_REQUESTS = 20_000_000

Ms = Annotated[Number, Field(ge=0, le=1e7)]
Positive = Annotated[Number, Field(gt=0, le=1e9)]
Share = Annotated[Number, Field(ge=0, le=1)]
Tokens = Annotated[Integer, Field(ge=1, le=10_000_000)]
Rows = Annotated[Integer, Field(ge=1, le=MAX_ROWS)]
Rank = Annotated[Integer, Field(ge=1, le=RANK_CLASSES[-1])]
Name = Annotated[str, Field(min_length=1, max_length=100)]


class Form(BaseModel):
    """A form; names may be written likeThis or like_this. Messages use likeThis."""

    model_config = ConfigDict(extra="forbid", frozen=True, alias_generator=to_camel, populate_by_name=True)


class StepsForm(Form):
    """A decode step of n rows takes `base_ms + n row_ms`, plus `kv_token_us` for each cached token, plus what
    variants add. A step that fills n prompt tokens takes
    `max(base_ms, prompt_base_ms + n prompt_token_ms)`."""

    base_ms: Annotated[Number, Field(gt=0, le=1e6)]
    row_ms: Ms = 0.0
    kv_token_us: Ms = 0.0
    prompt_base_ms: Ms | None = None
    prompt_token_ms: Ms = 0.0
    rank_us: Ms = 0.0
    padded: bool = False
    launch_ms: dict[VariantKind, Ms] = {}
    any_variant_ms: Ms = 0.0
    path_ms: Ms = 0.0


class EstimateForm(Form):
    """A config.json, estimated by the roofline on GPUs of a type that `ostinato plan` knows.

    If the group leaves out `kv_tokens`, the sizes of its engines are chosen as in `ostinato plan`: for this
    intent and expected load, with `memory_gib` of each GPU (by default all that such a GPU has)."""

    config: Path
    gpu: Name
    quantization: Name = "none"
    tensor_parallel: Annotated[Integer, Field(ge=1, le=64)] = 1
    pipeline_parallel: Annotated[Integer, Field(ge=1, le=64)] = 1
    memory_gib: Annotated[Number, Field(ge=1e-3, le=1e6)] | None = None
    intent: Intent = Intent.MIN_COST
    rate_per_s: Annotated[Number, Field(ge=0, le=1e9)] = 0.0
    input_tokens: Tokens | None = None
    output_tokens: Tokens | None = None


class GroupsForm(Form):
    """`count` equal worker groups. `kv_tokens` may be left out with an `estimate`: then they, `max_rows` and
    `slots` are chosen, as far as they are left out (`controlplane.cli.planned_groups`)."""

    count: Annotated[Integer, Field(ge=1, le=MAX_GROUPS)]
    gpus: Annotated[Integer, Field(ge=1, le=10_000)] = 1
    steps: StepsForm | None = None
    estimate: EstimateForm | None = None
    max_rows: Rows = 256
    batched_tokens: Tokens = 2048
    kv_tokens: Tokens | None = None
    slots: Annotated[Integer, Field(ge=1, le=10_000)] = 8
    load_gb_per_s: Positive = 20.0
    fetch_gb_per_s: Positive = 2.0

    @model_validator(mode="after")
    def _one_of_two(self) -> Self:
        if (self.steps is None) == (self.estimate is None):
            raise ValueError("expected either steps or estimate, got both or neither")
        if self.steps is not None and self.kv_tokens is None:
            raise ValueError("expected kvTokens, because steps need it")
        return self

    @property
    def cache_tokens(self) -> int:
        """`kv_tokens`, given or chosen. Raises ScenarioError."""
        if self.kv_tokens is None:
            raise ScenarioError("cluster.groups.kvTokens: expected a number, or sizes that were chosen")
        return self.kv_tokens


class ClusterForm(Form):
    groups: Annotated[tuple[GroupsForm, ...], Field(min_length=1, max_length=64)]

    @property
    def count(self) -> int:
        return sum(groups.count for groups in self.groups)


class EngineForm(Form):
    """`variant_limit`: variants that run at once; by default as many as there are slots.
    `almost_done_tokens`: a request that skipped the queue and has more tokens left is preempted when its
    parent has ended. `host_gib`: memory for variants in each group's host; none: unbounded. `warm`: variants
    are there at the start, as far as they fit."""

    variant_limit: Annotated[Integer, Field(ge=1, le=10_000)] | None = None
    longest_wait_s: Positive = 30.0
    almost_done_tokens: Annotated[Integer, Field(ge=0, le=1 << 30)] = 8
    host_gib: Annotated[Number, Field(ge=0, le=1e6)] | None = None
    warm: bool = True
    look_ahead: Annotated[Integer, Field(ge=0, le=16)] = 1


class GatewayForm(Form):
    """At most `max_ongoing` requests are at a group at once; `places` others wait (controlplane/gateway)."""

    max_ongoing: Annotated[Integer, Field(ge=1, le=10_000)] = 256
    places: Annotated[Integer, Field(ge=1, le=10_000_000)] = 1_000
    aging_s: Positive = 10.0
    turns: Annotated[Integer, Field(ge=2, le=1_000)] = 4
    refuse: bool = True
    tick_s: Positive = 5.0


class VariantsForm(Form):
    """`count` variants that differ only in their ranks, which are drawn by weight. What each adds to a step:
    `row_us` for each of its rows, `variant_ms` once; and `prompt_token_us` for each filled token."""

    kind: VariantKind
    count: Annotated[Integer, Field(ge=1, le=MAX_VARIANTS)]
    ranks: dict[Rank, Positive] = {}
    mib: Annotated[Number, Field(ge=0, le=1e6)] = 0.0
    mib_per_rank: Annotated[Number, Field(ge=0, le=1e4)] = 0.0
    row_us: Ms = 0.0
    variant_ms: Ms | None = None
    prompt_token_us: Ms = 0.0

    @model_validator(mode="before")
    @classmethod
    def _list_of_ranks(cls, value: object) -> object:
        """Accept `[8, 64]` for `{8: 1, 64: 1}`."""
        if isinstance(value, dict) and isinstance(value.get("ranks"), list):
            _check_names("ranks", value["ranks"])
            return {**value, "ranks": dict.fromkeys(value["ranks"], 1)}
        return value

    @field_validator("ranks")
    @classmethod
    def _in_order(cls, ranks: dict[int, float]) -> dict[int, float]:
        """Sort the ranks, so that draws do not depend on their order in the file."""
        return dict(sorted(ranks.items()))


class DriftForm(Form):
    """Every `period_s` a `share` of the variants, drawn again each time, exchange their popularity."""

    period_s: Positive
    share: Share = 0.5


class PopularityForm(Form):
    kind: Literal["zipf", "uniform"] = "zipf"
    exponent: Annotated[Number, Field(ge=0, le=10)] = 1.0
    base_share: Share = 0.0
    drift: DriftForm | None = None


class LengthsForm(Form):
    """Lengths in tokens. `fixed`: the mean; `uniform`: from least to most; `lognormal`: mean and cv, and
    `geometric`: the mean, each before values out of bounds are moved to the bound."""

    kind: Literal["fixed", "uniform", "lognormal", "geometric"] = "fixed"
    mean: Annotated[Number, Field(ge=1, le=10_000_000)] | None = None
    cv: Annotated[Number, Field(gt=0, le=100)] = 1.0
    least: Tokens = 1
    most: Tokens = 4096

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if self.least > self.most:
            raise ValueError(f"expected least <= most, got {self.least} and {self.most}")
        if self.kind != "uniform" and self.mean is None:
            raise ValueError(f"expected mean, because lengths of kind {self.kind} need it")
        if self.mean is not None and not self.least <= self.mean <= self.most:
            raise ValueError(f"expected mean between {self.least} and {self.most}, got {self.mean:g}")
        return self


class Arrivals(StrEnum):
    POISSON = "poisson"
    GAMMA = "gamma"
    TRACE = "trace"


class TrafficForm(Form):
    """`rate_per_s` requests come each second, or each of `rates` is tried. A trace without either comes as
    recorded; with `repeat` it begins again until the horizon."""

    arrivals: Arrivals = Arrivals.POISSON
    rate_per_s: Positive | None = None
    rates: Annotated[tuple[Positive, ...], Field(max_length=100)] = ()
    cv: Annotated[Number, Field(gt=0, le=100)] = 1.0
    file: Path | None = None
    repeat: bool = False
    prompt_tokens: LengthsForm | None = None
    output_tokens: LengthsForm | None = None
    expected_output: Literal["mean", "exact"] = "mean"

    @model_validator(mode="after")
    def _complete(self) -> Self:
        if self.rate_per_s is not None and self.rates:
            raise ValueError("expected either ratePerS or rates, got both")
        if self.arrivals is Arrivals.TRACE:
            if self.file is None:
                raise ValueError("expected file, because arrivals of a trace need it")
            return self
        if self.rate_per_s is None and not self.rates:
            raise ValueError(f"expected ratePerS or rates, because {self.arrivals} arrivals need one of them")
        if self.prompt_tokens is None or self.output_tokens is None:
            raise ValueError(
                f"expected promptTokens and outputTokens, because {self.arrivals} arrivals need both"
            )
        return self


class TenantForm(Form):
    name: Name
    weight: Positive = 1.0
    max_waiting: Annotated[Integer, Field(ge=0, le=10_000_000)] | None = None


class ClassForm(Form):
    """A `share` of all requests (in proportion to the other shares), with its promises, and its own lengths
    if they are given."""

    name: Name = "all"
    share: Positive = 1.0
    ttft_ms: Annotated[Number, Field(gt=0, le=1e9)] | None = None
    tpot_ms: Annotated[Number, Field(gt=0, le=1e9)] | None = None
    deadline_ms: Annotated[Number, Field(gt=0, le=1e9)] | None = None
    priority: Priority = Priority.NORMAL
    late: LatePolicy = LatePolicy.FINISH
    tenant: Name = "default"
    prompt_tokens: LengthsForm | None = None
    output_tokens: LengthsForm | None = None


class ScenarioForm(Form):
    """Requests that come in the first `warm_up_s` are served but not counted."""

    name: Name = "scenario"
    cluster: ClusterForm
    engine: EngineForm = EngineForm()
    gateway: GatewayForm = GatewayForm()
    variants: Annotated[tuple[VariantsForm, ...], Field(max_length=1_000)] = ()
    popularity: PopularityForm = PopularityForm()
    traffic: TrafficForm
    classes: Annotated[tuple[ClassForm, ...], Field(min_length=1, max_length=100)] = (ClassForm(),)
    tenants: Annotated[tuple[TenantForm, ...], Field(max_length=1_000)] = ()
    policies: Annotated[tuple[str, ...], Field(min_length=1)] = ("least-harm",)
    seeds: Annotated[Integer, Field(ge=1, le=1_000)] = 3
    horizon_s: Annotated[Number, Field(gt=0, le=1e7)] = 300.0
    warm_up_s: Annotated[Number, Field(ge=0, le=1e7)] = 0.0

    @property
    def variant_count(self) -> int:
        return sum(variants.count for variants in self.variants)

    @field_validator("policies")
    @classmethod
    def _known(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        unknown = [name for name in names if name not in POLICIES]
        if unknown:
            raise ValueError(f"expected any of {', '.join(POLICIES)}; got {unknown[0]}")
        return names

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.warm_up_s >= self.horizon_s:
            raise ValueError(f"expected warmUpS below horizonS, got {self.warm_up_s:g}")
        _check_names("classes", [one.name for one in self.classes])
        _check_names("tenants", [one.name for one in self.tenants])
        if self.cluster.count > MAX_GROUPS or self.variant_count > MAX_VARIANTS:
            raise ValueError(f"expected at most {MAX_GROUPS} groups and {MAX_VARIANTS} variants in all")
        if self.cluster.count * (1 + self.variant_count) > MAX_PLACES:
            raise ValueError(f"expected groups x variants of at most {MAX_PLACES}")
        most = max((self.traffic.rate_per_s or 0, *self.traffic.rates)) * self.horizon_s
        if most > MAX_REQUESTS:
            raise ValueError(f"expected at most {MAX_REQUESTS} requests (rate x horizonS), got {most:g}")
        return self


def _check_names(field: str, names: list[Any]) -> None:
    twice = [name for name in names if names.count(name) > 1]
    if twice:
        raise ValueError(f"{field}: {twice[0]} is named twice; give each its own name")
