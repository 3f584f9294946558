"""The placement for a model, a deployment and the devices. Pure.

This module gives the search (`placement.solver`) its question, adds what is known of the model, and
interprets the answer. `engine_config` turns the placement into what is launched.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from controlplane.planning import engine_sizes, infeasibility
from controlplane.planning.variant_room import Room, rooms
from controlplane.profiling import memory_feedback
from controlplane.profiling.calibrations import (
    NO_MEASUREMENTS,
    ClusterMeasurements,
    Profiles,
    measured_while_busy,
)
from controlplane.profiling.keys import engine_dtype, overheads, served_spec, spec_of
from controlplane.profiling.usual_engine import BATCHED_TOKENS
from controlplane.settings import Settings
from controlplane.state.records import Deployment, Model
from controlplane.state.terms import EXPECTED_INPUT_TOKENS, EXPECTED_OUTPUT_TOKENS
from controlplane.state.worker_groups import WorkerGroup
from placement.solver.cluster import Cluster, Resident
from placement.solver.decide import decide as decide_on
from placement.solver.decide import eased
from placement.solver.explain import reason
from placement.solver.from_inventory import clusters_of, type_name
from placement.solver.from_spec import figures_by_quantization
from placement.solver.layout import resident
from placement.solver.outcome import NotPlaced, Outcome
from placement.solver.places import Shared
from placement.solver.policies.base import EstimatorFor
from placement.solver.policies.joint import Joint
from placement.solver.profiled import Knowledge, Measured, Profiled
from placement.solver.request import Request
from placement.solver.sizing import MEMORY, SizeRange, choose, told, usual_request
from placement.types import (
    CPU,
    Constraint,
    Device,
    DeviceKey,
    EngineSizes,
    Inventory,
    Placement,
    Plan,
    Relaxation,
    Unusable,
)
from profiler.plans import quantization_names
from profiler.predicting.predict import predict
from profiler.quantization import UNCOMPRESSED, accuracy_of
from profiler.types import ModelSpec, Workload

MAX_PARALLEL = 8  # TP and PP, unless the request names more

POLICY = Joint()


def decide(
    model: Model,
    deployment: Deployment,
    inventory: Inventory,
    settings: Settings,
    variants: Sequence[Model] = (),
    known: ClusterMeasurements = NO_MEASUREMENTS,
    others: Sequence[Deployment] = (),
) -> Placement:
    """The placement that best meets the deployment's intent, with room for the base's `variants`.

    GPUs come before CPU hosts, and among several types the one that serves the intent best. `others` are the
    deployments that count for anti-affinity and the devices' expected load (`exclude_group`). Estimates are
    calibrated if this architecture is `known` on this kind of device, otherwise scaled from another kind or
    rough. Limits on TTFT and latency include the request path, if that is known. Errors: NoFeasiblePlan, with
    the binding constraint and what would suffice; NotReady.
    """
    spec_of(model)
    clusters = clusters_of(inventory, _residents(others))
    if not clusters:
        raise infeasibility.no_device(inventory)
    by_cluster = (
        _question(model, deployment, cluster, inventory, settings, variants, known) for cluster in clusters
    )
    questions = [question for question in by_cluster if question is not None]
    if not questions:
        served = _served(model, clusters[0], settings)
        raise infeasibility.no_technique(model.compression, served, _gpu(clusters[0]))
    answers = [(question, question.answer()) for question in questions]
    best = _best([outcome for _, outcome in answers if isinstance(outcome, Placement)])
    if best is None and deployment.auto_relax.allowed:
        max_factor = deployment.auto_relax.max_factor
        best = _best(
            [relaxed for q, refusal in answers if (relaxed := _eased(q, refusal, max_factor)) is not None]
        )
    if best is None:
        missed = [outcome for _, outcome in answers if isinstance(outcome, NotPlaced)]
        busy = measured_while_busy(model, inventory, settings, known.profiles)
        raise infeasibility.refusal(_nearest(missed), deployment.auto_relax, inventory.unusable, busy)
    return dataclasses.replace(best, reason=reason(best, inventory, known.path is None))


def _eased(question: Question, outcome: Outcome, max_factor: float | None) -> Placement | None:
    if isinstance(outcome, Placement):
        return None
    refusal = outcome

    def find(estimator: EstimatorFor) -> Placement | None:
        return eased(question.cluster, question.request, refusal, POLICY, estimator, max_factor)

    placement = question.with_most_room(find)
    return placement and question.noted(told(placement, question.sizes, MEMORY))


def _best(placements: Sequence[Placement]) -> Placement | None:
    """The most preferred placement; among equals the one with the best objective."""
    return min(
        placements, key=lambda placement: (*preference(placement), placement.choice.objective), default=None
    )


def preference(placed: Placement) -> tuple[bool, float, bool]:
    """A sort key, lower is better: on GPUs rather than CPUs, then with limits relaxed least, then with an
    engine of usual size."""
    factor = max((relaxation.factor for relaxation in placed.choice.relaxed), default=1.0)
    return placed.ranks[0].device_kind == CPU, factor, placed.choice.reduced


def _nearest(missed: Sequence[NotPlaced]) -> NotPlaced:
    """The refusal of the type of device whose limits would have to be relaxed least."""

    def rank(outcome: NotPlaced) -> tuple[bool, bool, float]:
        factor = max(
            (relaxation.factor for relaxation in outcome.relaxations[: None if outcome.together else 1]),
            default=0.0,
        )
        return not outcome.relaxations, outcome.together, factor

    return min(missed, key=rank)


@dataclass(frozen=True)
class Question:
    """What is to be placed on which devices, and what is known of the model there. `request` is for an engine
    of usual size, `sizes` are the sizes that may be chosen. `rooms`: possible memory for variants, the most
    first. `merged`: whether a merged slot is kept; the first value that fits counts. `left_out` are
    quantizations that are not considered."""

    cluster: Cluster
    request: Request
    sizes: SizeRange
    known: Knowledge
    rooms: tuple[Room, ...]
    merged: tuple[bool, ...] = (False,)
    left_out: tuple[str, ...] = ()
    about_variants: str = ""

    def answer(self) -> Outcome:
        """The outcome, with room for as many variants as the devices have memory for."""
        for merged in self.merged:
            placement = self._with(merged).sized()
            last_choice = merged == self.merged[-1]
            if placement is not None and (last_choice or not placement.choice.reduced):
                return self.noted(placement)
        last = self._with(self.merged[-1])
        return decide_on(self.cluster, self.request, POLICY, last._estimator(self.rooms[-1]))

    def _with(self, merged: bool) -> Question:
        plan = dataclasses.replace(self.known.plan, merged_slot=merged)
        return dataclasses.replace(self, known=dataclasses.replace(self.known, plan=plan), merged=(merged,))

    def sized(self) -> Placement | None:
        """The largest engine that the intent allows (`placement.solver.sizing`)."""
        searches = _Searches(self)
        return choose(self.request, self.sizes, searches.usual, searches.search, self._token_s)

    def _token_s(self, placement: Placement, requests: int) -> float:
        """Seconds of a token while an engine with this placement runs `requests` requests."""
        plan, used = placement.plan, {(rank.node, rank.device_index) for rank in placement.ranks}
        at = [gpu for node in self.cluster.nodes for gpu in node.gpus if (node.name, gpu.index) in used]
        kinds = {kind.name: kind for kind in self.cluster.types}
        slowest = min((kinds[gpu.type] for gpu in at), key=lambda kind: kind.memory_bytes_per_s)
        ground = self.known.ground(slowest, plan.world_size, plan.tensor_parallel)
        load = Workload(requests, self.request.input_tokens, self.request.output_tokens)
        return predict(ground, plan, load).tpot_s.value

    def with_most_room(self, find: Callable[[EstimatorFor], Placement | None]) -> Placement | None:
        """The placement with the most room for variants that has a placement at all."""
        if (found := find(self._estimator(self.rooms[0]))) is not None or len(self.rooms) == 1:
            return found
        refused, placed = 0, len(self.rooms) - 1
        found = find(self._estimator(self.rooms[placed]))
        while found is not None and placed - refused > 1:
            middle = (refused + placed) // 2
            if (more := find(self._estimator(self.rooms[middle]))) is None:
                refused = middle
            else:
                found, placed = more, middle
        return found

    def noted(self, placement: Placement) -> Placement:
        notes = (
            f"{quantization} was left out: it has not been measured on such a device"
            for quantization in self.left_out
        )
        choice = placement.choice
        said = ", ".join(filter(None, (choice.sizes, self.about_variants)))
        choice = dataclasses.replace(choice, notes=(*choice.notes, *notes), sizes=said)
        return dataclasses.replace(placement, choice=choice)

    def _estimator(self, room: Room) -> EstimatorFor:
        plan = dataclasses.replace(self.known.plan, room=room)
        known = dataclasses.replace(self.known, plan=plan)
        return lambda cluster, request: Profiled(cluster, request, known)


class _Searches:
    """The searches for the engine of one question, with the room for variants of the engine of usual size."""

    def __init__(self, question: Question) -> None:
        self._question = question
        self._room = question.rooms[-1]
        self._shared: dict[Room, Shared] = {}

    def usual(self, request: Request) -> Placement | None:
        """The engine of usual size, with the most room for variants."""
        question = self._question
        found = question.with_most_room(partial(POLICY.find, question.cluster, request))
        self._room = question.rooms[-1] if found is None else found.plan.room
        return found

    def search(self, request: Request) -> Placement | None:
        question, room = self._question, self._room
        if room not in self._shared:
            self._shared[room] = Shared(question.cluster, question._estimator(room))
        return POLICY.search(self._shared[room], request)


def _question(
    model: Model,
    deployment: Deployment,
    cluster: Cluster,
    inventory: Inventory,
    settings: Settings,
    variants: Sequence[Model],
    known: ClusterMeasurements,
) -> Question | None:
    """The question for a cluster; None if engines have the model in none of its registered quantizations.

    Errors: NoFeasiblePlan when the expected lengths exceed the engine's limit.
    """
    spec = _served(model, cluster, settings)
    every = quantization_names(model.compression, spec, _gpu(cluster))
    if not every:
        return None
    kind = cluster.types[0].kind
    measured = _measured(model, cluster, inventory, settings, known.profiles)
    quantizations = _tried(every, cluster, measured)
    lengths = _lengths(deployment, engine_sizes.max_context(deployment, spec, settings))
    sizes = engine_sizes.size_range(deployment, spec, kind, settings, _min_context(deployment, lengths))
    request = _request(model, deployment, spec, quantizations, lengths, settings)
    request = usual_request(request, sizes)
    plan = Plan(1, (spec.num_layers,), UNCOMPRESSED, request.context, request.kv_tokens, 0, 0)
    chosen = engine_sizes.variant_sizes(variants, spec, kind, settings, deployment, _host_free(inventory))
    merged = engine_sizes.merged_slots(deployment, variants, spec, _gpu(cluster))
    chosen = dataclasses.replace(chosen, merged_slot=merged[-1])
    possible = rooms(variants, spec, chosen)
    with_room = with_room_for_variants(plan, spec, chosen, variants, possible[0])
    return Question(
        cluster,
        request,
        sizes,
        Knowledge(spec, with_room, measured, overheads(settings, kind), known.path),
        possible,
        merged,
        tuple(quantization for quantization in every if quantization not in quantizations),
        engine_sizes.variants_text(chosen, variants, deployment),
    )


def _host_free(inventory: Inventory) -> int | None:
    """Free memory of the host with the least."""
    return min((device.free_bytes for device in inventory.devices if device.kind == CPU), default=None)


def _min_context(deployment: Deployment, lengths: tuple[int, int]) -> int:
    """The least context of an engine: for the expected lengths, and for the longest answer."""
    return max(sum(lengths), (deployment.max_output_tokens or 0) + 1)


def _served(model: Model, cluster: Cluster, settings: Settings) -> ModelSpec:
    """The model as engines on such devices hold it."""
    return served_spec(spec_of(model), engine_dtype(settings, cluster.types[0].kind))


def _gpu(cluster: Cluster) -> str:
    """The name of the cluster's only type of GPU; "" for CPU hosts."""
    return "" if cluster.types[0].shared else cluster.types[0].name


def _tried(
    quantizations: tuple[str, ...], cluster: Cluster, measured: Mapping[str, Measured]
) -> tuple[str, ...]:
    """The quantizations in which the model was measured on such a device; all of them if there are none.

    An engine that failed when it was measured would fail again.
    """
    known = [measured[kind.name].calibration for kind in cluster.types if kind.name in measured]
    tried = {cut.quantization for calibration in known for cut in calibration.times}
    return tuple(quantization for quantization in quantizations if quantization in tried) or quantizations


def _request(
    model: Model,
    deployment: Deployment,
    spec: ModelSpec,
    quantizations: Sequence[str],
    lengths: tuple[int, int],
    settings: Settings,
) -> Request:
    accuracies = {
        quantization: accuracy_of(model.compression, quantization) for quantization in quantizations
    }
    constraints = deployment.constraints
    inputs, outputs = lengths
    return Request(
        name=model.name,
        model=figures_by_quantization(model.name, spec, accuracies),
        intent=deployment.intent,
        cost=settings.cost_measure,
        slos=deployment.slos,
        rate_per_s=deployment.load.rate_per_s / max(1, deployment.scaling.min_groups),
        input_tokens=inputs,
        output_tokens=outputs,
        max_tp=max(MAX_PARALLEL, *constraints.tensor_parallel, 0),
        max_pp=max(MAX_PARALLEL, *constraints.pipeline_parallel, len(constraints.layers_per_stage)),
        only_tp=constraints.tensor_parallel,
        only_pp=constraints.pipeline_parallel,
        layers=constraints.layers_per_stage,
        group=constraints.group,
        scope=constraints.scope,
    )


def _lengths(deployment: Deployment, context: int) -> tuple[int, int]:
    """Tokens of a prompt and of an answer: as the deployment expects, or else the defaults, within the
    context. (MaverIQ, too, judges one request at a time.)

    Errors: NoFeasiblePlan.
    """
    given_inputs, given_outputs = deployment.load.input_tokens, deployment.load.output_tokens
    longest = min(EXPECTED_OUTPUT_TOKENS, deployment.max_output_tokens or EXPECTED_OUTPUT_TOKENS)
    outputs = given_outputs or max(1, min(longest, context - (given_inputs or 1)))
    inputs = given_inputs or max(1, min(EXPECTED_INPUT_TOKENS, context - outputs))
    if inputs + outputs <= context:
        return inputs, outputs
    total = inputs + outputs
    text = (
        f"expect prompts and answers of {context} tokens together, the engine's context, instead of {total}"
    )
    relaxation = Relaxation(Constraint.CONTEXT, total, context, total / context, text)
    raise infeasibility.refusal(NotPlaced(deployment.model, Constraint.CONTEXT, "", (relaxation,)))


def _measured(
    model: Model, cluster: Cluster, inventory: Inventory, settings: Settings, profiles: Profiles
) -> dict[str, Measured]:
    """The profiles of this architecture, for each type of GPU, or of CPU host, that has one.

    Types of other clusters are included: a type without measurements is scaled from a measured type.
    """
    on_cpu, slowest = cluster.types[0].shared, dict[str, Device]()
    for device in sorted(inventory.devices, key=lambda d: -d.rates.memory_bytes_per_s):
        if (device.kind == CPU) == on_cpu:
            slowest[type_name(device)] = device
    measured = {name: memory_feedback.known_on(model, d, settings, profiles) for name, d in slowest.items()}
    return {name: known for name, known in measured.items() if known}


def suited(inventory: Inventory, kind: str) -> Inventory:
    """The devices that may replace devices of this kind. Empty kind: all devices.

    A CPU host does not replace a GPU: no user chose such a slow engine.
    """
    if kind in ("", CPU):
        return inventory
    hosts = [d for d in inventory.devices if d.kind == CPU]
    left_out = (
        Unusable(d.node, f"node {d.node} has no GPU, and this was on {kind} (undeploy to choose anew)")
        for d in hosts
    )
    devices = tuple(d for d in inventory.devices if d.kind != CPU)
    return dataclasses.replace(inventory, devices=devices, unusable=(*inventory.unusable, *left_out))


def exclude_group(deployments: Iterable[Deployment], group_id: str) -> list[Deployment]:
    """The deployments without the placement of one group, which is to be placed again."""
    return [dataclasses.replace(d, groups=_without(d, group_id)) for d in deployments]


def _without(deployment: Deployment, group_id: str) -> tuple[WorkerGroup, ...]:
    return tuple(
        dataclasses.replace(group, placement=None) if other_id == group_id else group
        for other_id, group in zip(deployment.group_ids(), deployment.groups, strict=True)
    )


def _residents(others: Iterable[Deployment]) -> dict[DeviceKey, list[Resident]]:
    """Ranks of placed groups by device."""
    residents: dict[DeviceKey, list[Resident]] = {}
    for other in others:
        for group_id, group in zip(other.group_ids(), other.groups, strict=True):
            if (placed := group.placement) is None:
                continue
            for rank in placed.ranks:
                held = resident(group_id, rank, placed, other.constraints.group, other.constraints.scope)
                residents.setdefault(rank.device, []).append(held)
    return residents


def with_room_for_variants(
    plan: Plan, spec: ModelSpec, sizes: EngineSizes, variants: Sequence[Model], room: Room | None = None
) -> Plan:
    """The plan with slots of these `sizes` for the base's `variants`. `room`: one of `rooms`; None: the
    largest."""
    return dataclasses.replace(
        plan,
        max_variants=sizes.variant_slots or 0,
        max_lora_rank=sizes.lora_rank or 0,
        variant_host_bytes=sizes.variant_host_bytes or 0,
        room=rooms(variants, spec, sizes)[0] if room is None else room,
        batched_tokens=BATCHED_TOKENS,
        merged_slot=bool(sizes.merged_slot),
    )
