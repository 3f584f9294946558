"""What is to be placed on which devices, and the search for its placement. Pure.

This module gives the search (`placement.solver`) its question, and adds what is known of the model.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from controlplane.planning import engine_sizes, infeasibility
from controlplane.planning.variant_room import Room, rooms, with_room_for_variants
from controlplane.profiling import memory_feedback
from controlplane.profiling.calibrations import NO_MEASUREMENTS, ClusterMeasurements, Profiles
from controlplane.profiling.keys import engine_dtype, overheads, served_spec, spec_of
from controlplane.settings import Settings
from controlplane.state.records import Deployment, Model
from controlplane.state.terms import EXPECTED_INPUT_TOKENS, EXPECTED_OUTPUT_TOKENS
from placement.solver.cluster import Cluster
from placement.solver.decide import decide
from placement.solver.from_inventory import type_name
from placement.solver.from_spec import figures_by_quantization
from placement.solver.outcome import NotPlaced, Outcome
from placement.solver.places import Shared
from placement.solver.policies.base import EstimatorFor, Policy
from placement.solver.policies.joint import Joint
from placement.solver.profiled import Knowledge, Measured, Profiled
from placement.solver.request import Request
from placement.solver.sizing import SizeRange, choose, smallest_request, usual_request
from placement.types import CPU, Constraint, Device, Inventory, Placement, Relaxation
from profiler.plans import quantization_names
from profiler.predicting.predict import predict
from profiler.quantization import UNCOMPRESSED, accuracy_of
from profiler.types import ModelSpec, Plan, Workload

MAX_PARALLEL = 8  # TP and PP, unless the request names more

POLICY = Joint()


@dataclass(frozen=True)
class Wanted:
    """A deployment of a model to be placed on devices of `inventory`, of which `known` has measurements.
    `variants` are registered for the model; `policy` searches for the place."""

    model: Model
    deployment: Deployment
    inventory: Inventory
    settings: Settings
    variants: Sequence[Model] = ()
    known: ClusterMeasurements = NO_MEASUREMENTS
    policy: Policy = POLICY


@dataclass(frozen=True)
class Question:
    """What is to be placed on which devices, and what is known of the model there. `request` is for an engine
    of usual size, `sizes` are the sizes that may be chosen. `rooms`: possible memory for variants, the most
    first. `merged`: whether a merged slot is kept; the first value that fits counts. `left_out` are
    quantizations that are not considered."""

    cluster: Cluster
    deployment: Deployment
    settings: Settings
    request: Request
    sizes: SizeRange
    known: Knowledge
    rooms: tuple[Room, ...]
    merged: tuple[bool, ...] = (False,)
    left_out: tuple[str, ...] = ()
    about_variants: str = ""
    policy: Policy = POLICY

    def answer(self) -> Outcome:
        """The outcome, with room for as many variants as the devices have memory for."""
        if (placement := self.placement()) is not None:
            return placement
        estimator = self._with(self.merged[-1])._estimator(self.rooms[-1])
        usual = decide(self.cluster, self.request, self.policy, estimator)
        if isinstance(usual, Placement) or usual.relaxations:
            return usual
        return decide(self.cluster, self.smallest, self.policy, estimator)

    def placement(self) -> Placement | None:
        """The placement; None if there is none within every limit."""
        for merged in self.merged:
            placement = self._with(merged).sized()
            last_choice = merged == self.merged[-1]
            if placement is not None and (last_choice or not placement.choice.reduced):
                return self.noted(placement)
        return None

    @property
    def smallest(self) -> Request:
        """The request for the smallest engine."""
        return smallest_request(self.request, self.sizes)

    def fits(self) -> bool:
        """Whether any of the possible engines has a place. A rate may need more than the smallest one."""
        least = self._with(self.merged[-1])
        shared = Shared(self.cluster, least._estimator(self.rooms[-1]))
        if self.policy.fits(shared, self.smallest):
            return True
        return self.request.rate_per_s > 0 and least.sized() is not None

    def of(self, deployment: Deployment) -> Question:
        """The question for a deployment that differs in its context and the lengths of its requests.

        Errors: as `question_on`.
        """
        lengths, sizes = _lengths_and_sizes(
            deployment, self.known.spec, self.cluster.types[0].kind, self.settings
        )
        request = dataclasses.replace(self.request, input_tokens=lengths[0], output_tokens=lengths[1])
        return dataclasses.replace(
            self, deployment=deployment, sizes=sizes, request=usual_request(request, sizes)
        )

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
        notes = tuple(
            f"{quantization} was left out: it has not been measured on such a device"
            for quantization in self.left_out
        )
        if lengths := assumed_length(self.deployment, self.known.spec, self.settings):
            notes = (*notes, lengths)
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
        found = question.with_most_room(partial(question.policy.find, question.cluster, request))
        self._room = question.rooms[-1] if found is None else found.plan.room
        return found

    def search(self, request: Request) -> Placement | None:
        question, room = self._question, self._room
        if room not in self._shared:
            self._shared[room] = Shared(question.cluster, question._estimator(room))
        return question.policy.search(self._shared[room], request)


def question_on(wanted: Wanted, cluster: Cluster) -> Question | None:
    """The question for a cluster; None if engines have the model in none of its registered quantizations.

    Errors: NoFeasiblePlan when the expected lengths exceed the engine's limit.
    """
    model, deployment, settings = wanted.model, wanted.deployment, wanted.settings
    spec, variants = served_on(model, cluster, settings), wanted.variants
    every = quantization_names(model.compression, spec, gpu_of(cluster))
    if not every:
        return None
    kind = cluster.types[0].kind
    measured = _measured(wanted, cluster)
    quantizations = _tried(every, cluster, measured)
    lengths, sizes = _lengths_and_sizes(deployment, spec, kind, settings)
    request = _request(model, deployment, spec, quantizations, lengths, settings)
    request = usual_request(request, sizes)
    plan = Plan(1, (spec.num_layers,), UNCOMPRESSED, request.context, request.kv_tokens, 0, 0)
    host_free = _host_free(wanted.inventory)
    chosen = engine_sizes.variant_sizes(variants, spec, kind, settings, deployment, host_free)
    merged = engine_sizes.merged_slots(deployment, variants, spec, gpu_of(cluster))
    chosen = dataclasses.replace(chosen, merged_slot=merged[-1])
    possible = rooms(variants, spec, chosen)
    with_room = with_room_for_variants(plan, spec, chosen, variants, possible[0])
    return Question(
        cluster,
        deployment,
        settings,
        request,
        sizes,
        Knowledge(spec, with_room, measured, overheads(settings, kind), wanted.known.path),
        possible,
        merged,
        tuple(quantization for quantization in every if quantization not in quantizations),
        engine_sizes.variants_text(chosen, variants, deployment),
        wanted.policy,
    )


def served_on(model: Model, cluster: Cluster, settings: Settings) -> ModelSpec:
    """The model as engines on such devices hold it."""
    return served_spec(spec_of(model), engine_dtype(settings, cluster.types[0].kind))


def gpu_of(cluster: Cluster) -> str:
    """The name of the cluster's only type of GPU; "" for CPU hosts."""
    return "" if cluster.types[0].shared else cluster.types[0].name


def _host_free(inventory: Inventory) -> int | None:
    """Free memory of the host with the least."""
    return min((device.free_bytes for device in inventory.devices if device.kind == CPU), default=None)


def _lengths_and_sizes(
    deployment: Deployment, spec: ModelSpec, kind: str, settings: Settings
) -> tuple[tuple[int, int], SizeRange]:
    """The expected lengths, and the possible sizes of an engine. Its context holds the expected lengths, and
    the longest answer. Errors: NoFeasiblePlan."""
    lengths = _lengths(deployment, engine_sizes.max_context(deployment, spec, settings))
    min_context = max(sum(lengths), (deployment.max_output_tokens or 0) + 1)
    return lengths, engine_sizes.size_range(deployment, spec, kind, settings, min_context)


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


def assumed_length(deployment: Deployment, spec: ModelSpec, settings: Settings) -> str:
    """The length of answers that estimates assume, in words; empty if the deployment says what it expects."""
    if deployment.load.output_tokens is not None:
        return ""
    _, tokens = _lengths(deployment, engine_sizes.max_context(deployment, spec, settings))
    return (
        f"answers are assumed to have {tokens} tokens, because load.outputTokens does not say how many are "
        "expected"
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


def _measured(wanted: Wanted, cluster: Cluster) -> dict[str, Measured]:
    """The profiles of this architecture, for each type of GPU, or of CPU host, that has one.

    Types of other clusters are included: a type without measurements is scaled from a measured type.
    """
    on_cpu, slowest = cluster.types[0].shared, dict[str, Device]()
    for device in sorted(wanted.inventory.devices, key=lambda d: -d.rates.memory_bytes_per_s):
        if (device.kind == CPU) == on_cpu:
            slowest[type_name(device)] = device
    profiles: Profiles = wanted.known.profiles
    measured = {
        name: memory_feedback.known_on(wanted.model, device, wanted.settings, profiles)
        for name, device in slowest.items()
    }
    return {name: known for name, known in measured.items() if known}
