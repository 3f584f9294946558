"""The request of a deployment: intent (MaverIQ, Table 1), limits, expected load, constraints on the plan."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import AfterValidator, Field, model_validator

from controlplane.management.schemas.common import Name, Strict
from controlplane.state.terms import MAX_TARGET_MS, MIN_TARGET, LatePolicy, Priority
from profiler.parser_names import REASONING_PARSERS, TOOL_PARSERS

if TYPE_CHECKING:
    from controlplane.state import records
    from controlplane.state.records import ExpectedLoad, PlanConstraints, Scaling, ServingTargets
    from placement.types import EngineSizes, Slos

IntentName = Literal["minCost", "minLat", "minMem", "minGpuHours", "latSLO", "costSLO", "accSLO"]
Degree = Annotated[int, Field(ge=1, le=1024)]
Tokens = Annotated[int, Field(ge=1, le=1_000_000)]
MAX_TARGET = 1e6
NO_PARSER = "none"
MinReplicas = Annotated[int, Field(ge=0, le=64)]
MaxReplicas = Annotated[int, Field(ge=1, le=64)]
Target = Annotated[float, Field(ge=MIN_TARGET, le=MAX_TARGET, allow_inf_nan=False)]
Seconds = Annotated[float, Field(ge=1, le=1e7, allow_inf_nan=False)]
TargetMs = Annotated[float, Field(gt=0, le=MAX_TARGET_MS, allow_inf_nan=False)]


class SloLimits(Strict):
    """Limits; latencies in milliseconds, accuracy in percent, cost per request in the installation's measure
    (GiB-seconds unless it says otherwise). They hold whatever the intent, in any mix."""

    e2e_ms: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    ttft_ms: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    tpot_ms: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    cost: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    accuracy: float | None = Field(default=None, ge=0, le=100, allow_inf_nan=False)

    @classmethod
    def of(cls, slos: Slos) -> SloLimits:
        def ms(value_s: float | None) -> float | None:
            return None if value_s is None else value_s * 1000

        return cls.model_validate(
            {
                "e2e_ms": ms(slos.latency_s),
                "ttft_ms": ms(slos.ttft_s),
                "tpot_ms": ms(slos.tpot_s),
                "cost": slos.cost,
                "accuracy": slos.accuracy,
            }
        )


class LoadForm(Strict):
    """The expected load: requests per second, and the lengths of prompts and answers in tokens.

    The defaults are no rate, prompts of 128 tokens and answers of 256, or of `maxOutputLength` where that is
    less, cut to fit the context.
    """

    ratePerS: float = Field(default=0.0, ge=0, le=1e6, allow_inf_nan=False)
    inputTokens: Tokens | None = None
    outputTokens: Tokens | None = None

    @classmethod
    def of(cls, load: ExpectedLoad) -> LoadForm:
        return cls(ratePerS=load.rate_per_s, inputTokens=load.input_tokens, outputTokens=load.output_tokens)


class AntiAffinity(Strict):
    """Deployments of one `group` share no GPU, or no node."""

    group: Name
    scope: Literal["gpu", "node"] = "node"

    @classmethod
    def of(cls, constraints: PlanConstraints) -> AntiAffinity | None:
        if constraints.scope.value == "none":
            return None
        return cls(group=constraints.group, scope="gpu" if constraints.scope.value == "gpu" else "node")


class AutoRelax(Strict):
    """When nothing fits, the nearest relaxation may be applied, by at most `maxFactor` (any, if null)."""

    maxFactor: float | None = Field(default=None, ge=1, allow_inf_nan=False)

    @classmethod
    def of(cls, auto_relax: records.AutoRelax) -> AutoRelax | None:
        return cls(maxFactor=auto_relax.max_factor) if auto_relax.allowed else None


class Replicas(Strict):
    """How many engines a base has: from `min` to `max`, by its load.

    Engines are added while more than `targetInFlight` requests are under way for each (null: as many as an
    engine takes at once). With `min` 0 the last one stops after `idleS` without a request, until the next.
    """

    min: MinReplicas = 1
    max: MaxReplicas = 1
    targetInFlight: Target | None = None
    idleS: Seconds = 300.0

    @model_validator(mode="after")
    def _in_order(self) -> Replicas:
        if self.min > self.max:
            raise ValueError(f"expected min <= max, got min {self.min} and max {self.max}; raise max")
        return self

    @classmethod
    def of(cls, scaling: Scaling) -> Replicas:
        """A target that is out of bounds, which older versions accepted, is shown as the nearest bound."""
        target = scaling.target_in_flight
        if target is not None:
            target = min(max(target, MIN_TARGET), MAX_TARGET)
        return cls(
            min=scaling.min_groups, max=scaling.max_groups, targetInFlight=target, idleS=scaling.idle_s
        )


class Targets(Strict):
    """What each request of a deployment is served by, unless its headers say otherwise (docs/slos.md).

    A `ttft_ms` or `tpot_ms` that is left out is that of the SLOs. What a variant leaves out is its base's. In
    a change, fields that are left out stay as they are, and null takes a target away.
    """

    ttft_ms: TargetMs | None = Field(default=None, description="From arrival to the first token.")
    tpot_ms: TargetMs | None = Field(default=None, description="For each further token.")
    deadline_ms: TargetMs | None = Field(default=None, description="From arrival to the whole answer.")
    priority: Priority | None = Field(default=None, description="Default: normal.")
    late: LatePolicy | None = Field(
        default=None, description="Whether late requests are finished (the default) or dropped."
    )

    @classmethod
    def of(cls, targets: ServingTargets) -> Targets:
        def ms(value_s: float | None) -> float | None:
            return None if value_s is None else value_s * 1000

        return cls(
            ttft_ms=ms(targets.ttft_s),
            tpot_ms=ms(targets.tpot_s),
            deadline_ms=ms(targets.deadline_s),
            priority=targets.priority,
            late=targets.late,
        )


class ReplicasChange(Strict):
    """A change of the replicas of a deployed base. Fields that are left out stay as they are."""

    min: MinReplicas | None = None
    max: MaxReplicas | None = None
    targetInFlight: Target | None = Field(
        default=None,
        description="Target number of running requests per engine; null: as many as an engine takes.",
    )
    idleS: Seconds | None = None


SLO_FIELDS: dict[str, tuple[str, ...]] = {
    "latSLO": ("e2e_ms", "ttft_ms", "tpot_ms"),
    "costSLO": ("cost",),
    "accSLO": ("accuracy",),
}


def _parser(known: frozenset[str]) -> AfterValidator:
    """One of vLLM's, by its name, or "none"."""

    def check(name: str | None) -> str | None:
        if name is not None and name != NO_PARSER and name not in known:
            raise ValueError(f"expected {NO_PARSER}, or one of {', '.join(sorted(known))}; got {name[:80]!r}")
        return name

    return AfterValidator(check)


class EngineForm(Strict):
    """How large the engines of a base are. What is left out is chosen by the intent, the model, the variants
    that are registered and the free memory, and stays so for the engines that are placed later."""

    contextTokens: int | None = Field(
        default=None, ge=16, le=100_000_000, description="Longest prompt and answer together, in tokens."
    )
    requestsAtOnce: int | None = Field(
        default=None, ge=1, le=4096, description="Requests that an engine runs at once. Other requests wait."
    )
    variantSlots: int | None = Field(
        default=None, ge=1, le=1024, description="Variants that a batch may hold."
    )
    loraRank: int | None = Field(default=None, ge=1, le=512, description="Largest rank of LoRA adapters.")
    variantHostBytes: int | None = Field(
        default=None,
        ge=1 << 20,
        le=1 << 50,
        description="Host memory of each rank for variants that are ready to load.",
    )
    mergedSlot: bool | None = Field(
        default=None,
        description="Keep a copy of the weights if sparse deltas are registered. A delta that runs alone "
        "is then as fast as its merged model (on Hopper GPUs).",
    )

    @classmethod
    def of(cls, sizes: EngineSizes) -> EngineForm:
        return cls(
            contextTokens=sizes.context_tokens,
            requestsAtOnce=sizes.requests_at_once,
            variantSlots=sizes.variant_slots,
            loraRank=sizes.lora_rank,
            variantHostBytes=sizes.variant_host_bytes,
            mergedSlot=sizes.merged_slot,
        )


class DeployModelRequest(Strict):
    """`intent` is what to minimise within all limits. latSLO, costSLO and accSLO are minCost with that limit.

    `tensorParallel` and `pipelineParallel` list the degrees that are allowed (any, if empty);
    `layersPerStage` fixes the split.
    """

    model: Name
    maxOutputLength: int | None = Field(
        default=None,
        ge=1,
        le=1_000_000,
        description="Longest answer, in tokens. Default: what the context has room for.",
    )
    intent: IntentName = "minCost"
    SLOs: SloLimits = Field(default_factory=SloLimits)
    load: LoadForm = Field(default_factory=LoadForm)
    tensorParallel: list[Degree] = Field(default_factory=list, max_length=64)
    pipelineParallel: list[Degree] = Field(default_factory=list, max_length=64)
    layersPerStage: list[Degree] = Field(default_factory=list, max_length=1000)
    antiAffinity: AntiAffinity | None = None
    autoRelax: AutoRelax | None = None
    replicas: Replicas | None = Field(
        default=None, description="Default: one engine. Variants use the engines of their base."
    )
    targets: Targets | None = None
    engine: EngineForm | None = Field(
        default=None, description="Default: chosen by the planner. Variants use the engines of their base."
    )
    toolCallParser: Annotated[str | None, _parser(TOOL_PARSERS)] = Field(
        default=None,
        description="vLLM's parser of tool calls for a base and its variants; none: no parser. "
        "Default: as the chat template says.",
    )
    reasoningParser: Annotated[str | None, _parser(REASONING_PARSERS)] = Field(
        default=None, description="vLLM's parser of reasoning; none: no parser."
    )

    @model_validator(mode="after")
    def _slo_is_given(self) -> DeployModelRequest:
        wanted = SLO_FIELDS.get(self.intent, ())
        if wanted and all(getattr(self.SLOs, name) is None for name in wanted):
            options = ", ".join("--" + name.replace("_", "-") for name in wanted)
            raise ValueError(
                f"the intent {self.intent} needs at least one of SLOs.{', SLOs.'.join(wanted)} "
                f"(`ostinato deploy`: {options})"
            )
        stages = len(self.layersPerStage)
        if stages and self.pipelineParallel and stages not in self.pipelineParallel:
            raise ValueError(
                f"layersPerStage has {stages} stages, but pipelineParallel allows {self.pipelineParallel}; "
                "leave one of the fields out"
            )
        return self
