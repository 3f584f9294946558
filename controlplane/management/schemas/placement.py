"""Where a deployment is and why, as users see it. Times in milliseconds, sizes in bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from controlplane.management.schemas.common import IntervalView, View

if TYPE_CHECKING:
    from controlplane.planning.variant_room import AtOnce
    from controlplane.state.worker_groups import MeasuredRank, WorkerGroup
    from placement.types import Placement, RankPlacement, Relaxation
    from profiler.types import Interval

MS = 1000


class RankView(View):
    """`memoryBytes` are planned; `measuredBytes` are what it took once its engine was ready."""

    rank: int
    stage: int
    node: str
    device: str
    layers: tuple[int, int]
    memoryBytes: int
    measuredBytes: int | None = None

    @classmethod
    def of(cls, r: RankPlacement, measured_bytes: int | None = None) -> RankView:
        return cls(
            rank=r.rank,
            stage=r.stage,
            node=r.node,
            device=f"{r.device_kind}:{r.device_index}",
            layers=(r.layer_start, r.layer_end),
            memoryBytes=r.memory_bytes,
            measuredBytes=measured_bytes,
        )


class RelaxationView(View):
    """Moving `constraint` from `asked` to `offered` suffices; that is `factor` times worse."""

    constraint: str
    asked: float
    offered: float
    factor: float
    text: str

    @classmethod
    def of(cls, relaxation: Relaxation) -> RelaxationView:
        from controlplane.planning import infeasibility  # the server's: a client decides nothing

        return cls(**infeasibility.as_data(relaxation))


class ChoiceView(View):
    """Why this plan: it has the smallest `objective` of `alternatives` layouts of `shapes` shapes that keep
    every limit.

    Latencies are under the expected load, whose requests have `inputTokens` and `outputTokens` (0: a
    placement of an older version, which does not say it). One engine keeps up with `throughputPerS`
    requests; each stage is busy for its share in `utilisation`. `basis` is profile or rough. `relaxed` are
    the limits that were relaxed, as allowed.
    """

    objective: float
    unit: str
    inputTokens: int = 0
    outputTokens: int = 0
    alternatives: int
    shapes: int
    basis: str
    latencyMs: float
    ttftMs: IntervalView | None
    tpotMs: IntervalView | None
    throughputPerS: float
    utilisation: list[float]
    relaxed: list[RelaxationView]
    notes: list[str]

    @classmethod
    def of(cls, placement: Placement) -> ChoiceView:
        choice = placement.choice
        return cls(
            objective=choice.objective,
            unit=choice.unit,
            inputTokens=choice.input_tokens,
            outputTokens=choice.output_tokens,
            alternatives=choice.alternatives,
            shapes=choice.shapes,
            basis=placement.estimate.basis,
            latencyMs=choice.latency_s * MS,
            ttftMs=_ms(choice.ttft),
            tpotMs=_ms(choice.tpot),
            throughputPerS=choice.throughput_per_s,
            utilisation=list(choice.utilisation),
            relaxed=[RelaxationView.of(relaxation) for relaxation in choice.relaxed],
            notes=[*choice.reasons, *choice.notes],
        )


class VariantsAtOnceView(View):
    """Any `atOnce` of a base's `registered` variants run at once in one engine of the base; `tooLarge` names
    the variants that do not fit into its memory even alone."""

    registered: int
    atOnce: int
    tooLarge: list[str]

    @classmethod
    def of(cls, found: AtOnce | None) -> VariantsAtOnceView | None:
        if found is None:
            return None
        return cls(registered=found.registered, atOnce=found.count, tooLarge=list(found.too_large))


class PlanView(View):
    """The chosen plan: its shape, where its ranks run, what it should cost, and why it was chosen.

    `choice` is null for what an older version placed.
    """

    tensorParallel: int
    layersPerStage: list[int]
    quantization: str
    maxModelLen: int
    kvCacheTokens: int
    maxVariants: int
    maxLoraRank: int
    requestsAtOnce: int = 0
    variantHostBytes: int = 0
    mergedSlot: bool = False
    ranks: list[RankView]
    estimatedTtftMs: float
    estimatedTpotMs: float
    accuracy: float
    reason: str
    choice: ChoiceView | None = None

    @classmethod
    def of(cls, placement: Placement, measured: Sequence[MeasuredRank] = ()) -> PlanView:
        plan, estimate = placement.plan, placement.estimate
        measured_bytes = {r.rank: r.measured_bytes for r in measured}
        return cls(
            tensorParallel=plan.tensor_parallel,
            layersPerStage=list(plan.layers_per_stage),
            quantization=plan.quantization,
            maxModelLen=plan.max_model_len,
            kvCacheTokens=plan.kv_cache_tokens,
            maxVariants=plan.max_variants,
            maxLoraRank=plan.max_lora_rank,
            requestsAtOnce=plan.sequences,
            variantHostBytes=plan.variant_host_bytes,
            mergedSlot=plan.merged_slot,
            ranks=[RankView.of(r, measured_bytes.get(r.rank)) for r in placement.ranks],
            estimatedTtftMs=estimate.ttft_s * MS,
            estimatedTpotMs=estimate.tpot_s * MS,
            accuracy=estimate.accuracy,
            reason=placement.reason,
            choice=ChoiceView.of(placement) if placement.choice.unit else None,
        )


class PreviewView(View):
    """What a deployment would be on the cluster as it is now; nothing was done.

    `host` is the base whose engine would serve it. `running` says that this engine exists already, with this
    plan. `waits` names the measuring that the deployment would wait for, if any.
    """

    model: str
    host: str
    running: bool
    plan: PlanView | None
    waits: str = ""
    variantsAtOnce: VariantsAtOnceView | None = None


class GroupView(View):
    """One replica: a worker group with an engine. `name` is the group's id.

    `phase` is Pending (to be placed, at `retryAt` at the latest), Starting, Serving or Draining. `reason`
    says why it does not serve, or why no other one took its place. Once it serves, the group that it
    `replaces` is drained.
    """

    name: str
    phase: str
    reason: str
    failures: int
    retryAt: float | None
    plan: PlanView | None
    replaces: str | None = None

    @classmethod
    def of(cls, base: str, group: WorkerGroup) -> GroupView:
        from controlplane.state.worker_groups import group_id_of  # the server's: a client has the names

        return cls(
            name=group_id_of(base, group.number),
            phase=group.phase,
            reason=group.reason,
            failures=group.failures,
            retryAt=group.retry_at_s or None,
            plan=None if group.placement is None else PlanView.of(group.placement, group.measured),
            replaces=None if group.replaces is None else group_id_of(base, group.replaces),
        )


def _ms(interval: Interval | None) -> IntervalView | None:
    return None if interval is None else IntervalView.of(interval, MS)
