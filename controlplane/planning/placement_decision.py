"""The placement for a model, a deployment and the devices. Pure.

This module asks a question of each kind of devices (`placement_question`), and chooses among the answers.
`engine_config` turns the placement into what is launched.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

from controlplane.planning import infeasibility, shorter_context
from controlplane.planning.placement_question import (
    Question,
    Wanted,
    assumed_length,
    gpu_of,
    question_on,
    served_on,
)
from controlplane.profiling.calibrations import NO_MEASUREMENTS, ClusterMeasurements, measured_while_busy
from controlplane.profiling.keys import spec_of
from controlplane.settings import Settings
from controlplane.state.records import Deployment, Model
from controlplane.state.worker_groups import WorkerGroup
from placement.solver.cluster import Cluster, Resident
from placement.solver.decide import eased
from placement.solver.explain import reason
from placement.solver.from_inventory import clusters_of
from placement.solver.layout import resident
from placement.solver.outcome import NotPlaced, Outcome
from placement.solver.policies.base import EstimatorFor
from placement.solver.sizing import MEMORY, told
from placement.types import CPU, DeviceKey, Inventory, Placement, Unusable


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
    wanted = Wanted(model, deployment, inventory, settings, variants, known)
    outcome = decide_on(wanted, clusters_of(inventory, _residents(others)))
    if isinstance(outcome, NotPlaced):
        busy = measured_while_busy(model, inventory, settings, known.profiles)
        assumed = assumed_length(deployment, spec_of(model), settings)
        raise infeasibility.refusal(outcome, deployment.auto_relax, inventory.unusable, busy, assumed)
    return outcome


def decide_on(wanted: Wanted, clusters: Sequence[Cluster]) -> Outcome:
    """As `decide`, on these clusters, each of one type of devices, whose memory the inventory has, too.

    Errors: NoFeasiblePlan where no search is possible; NotReady.
    """
    model, deployment, inventory = wanted.model, wanted.deployment, wanted.inventory
    spec_of(model)
    if not clusters:
        raise infeasibility.no_device(inventory)
    by_cluster = (question_on(wanted, cluster) for cluster in clusters)
    questions = [question for question in by_cluster if question is not None]
    if not questions:
        served = served_on(model, clusters[0], wanted.settings)
        raise infeasibility.no_technique(model.compression, served, gpu_of(clusters[0]))
    answers = [(question, shorter_context.with_offer(question, question.answer())) for question in questions]
    best = _best([outcome for _, outcome in answers if isinstance(outcome, Placement)])
    if best is None and deployment.auto_relax.allowed:
        max_factor = deployment.auto_relax.max_factor
        best = _best(
            [relaxed for q, refusal in answers if (relaxed := _eased(q, refusal, max_factor)) is not None]
        )
    if best is None:
        return _nearest([outcome for _, outcome in answers if isinstance(outcome, NotPlaced)])
    return dataclasses.replace(best, reason=reason(best, inventory, wanted.known.path is None))


def _eased(question: Question, refusal: Outcome, max_factor: float | None) -> Placement | None:
    if isinstance(refusal, Placement):
        return None
    if shorter_context.is_nearest(refusal):
        return shorter_context.eased(question, refusal.relaxations[0], max_factor)

    def find(estimator: EstimatorFor) -> Placement | None:
        cluster, policy = question.cluster, question.policy
        usual = eased(cluster, question.request, refusal, policy, estimator, max_factor)
        return usual or eased(cluster, question.smallest, refusal, policy, estimator, max_factor)

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


def suited(inventory: Inventory, kind: str) -> Inventory:
    """The devices that may replace devices of this kind. Empty kind: all devices.

    A CPU host does not replace a GPU: no user chose such a slow engine.
    """
    if kind in ("", CPU):
        return inventory
    hosts = [d for d in inventory.devices if d.kind == CPU]
    left_out = (
        Unusable(d.node, f"node {d.node} has no GPU, and the engine ran on {kind} (undeploy to choose again)")
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
