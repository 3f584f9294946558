"""The actions that follow from the desired and the observed state: one pure function.

The controller calls it on every change of either side. The function keeps no state, so a controller that was
killed continues from the records.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from controlplane.cluster import reservations
from controlplane.cluster.engine_status import EngineStatus, EngineView
from controlplane.cluster.inventory import NodeState
from controlplane.planning import autoscaling, path_measuring, rescheduling, retrying
from controlplane.state import fair_turns
from controlplane.state.operations import open_operation
from controlplane.state.records import (
    Deployment,
    IdempotencyKey,
    Model,
    ModelProfile,
    NodeLedger,
    Operation,
    OperationKind,
    Phase,
)
from controlplane.state.repository import State
from controlplane.state.worker_groups import GroupPhase, WorkerGroup, base_of, group_id_of, is_spare

BEING_READ = (Phase.PENDING, Phase.PROFILING)  # phases of a model whose files are to be read, perhaps again


@dataclass(frozen=True)
class Observed:
    """Engines by worker group. `busy` holds the keys of actions that are still running. `wanted` is the
    target number of groups of a base's deployment under its load, if known. `path_key` describes the setup of
    the request path (`profiling.request_paths`); empty: it is not measured. `quiet`: no requests are under
    way. `keys_seen_s`: when the idempotency keys were last searched for expired ones; infinite: never
    search."""

    engines: Mapping[str, EngineView]
    busy: frozenset[str]
    now_s: float
    nodes: tuple[NodeState, ...] = ()
    wanted: Mapping[str, int] = field(default_factory=dict)
    path_key: str = ""
    quiet: bool = True
    keys_seen_s: float = math.inf


@dataclass(frozen=True)
class Action:
    """Something to do about `target`. Two actions with one key never run at the same time."""

    target: str

    @property
    def key(self) -> str:
        return f"{type(self).__name__}:{self.target}"


class ReadModel(Action):
    """Read and check a registered model's files."""


class Compress(Action):
    """Make a delta from a fine-tune."""


class RemoveArtifact(Action):
    """Remove what was made from a fine-tune, and forget its model."""


class Measure(Action):
    """Measure what a profile (the target is its key) still lacks."""


class MeasurePath(Action):
    """Measure the request path, to the engine of a base (the target)."""


class Admit(Action):
    """Commit the registration of a model that waited for its profile."""


class BeginProfile(Action):
    """Find the profile that was requested for a model, and have it measured."""


class EndProfile(Action):
    """End a request for a profile with its result."""


class Launch(Action):
    """Estimate, choose, place and start the engine of a worker group."""


class ConfirmServing(Action):
    """The engine of a worker group runs: record that."""


class Replan(Action):
    """A worker group cannot continue where it is: stop it, to have it placed again."""


class Scale(Action):
    """Adjust the number of a base's groups to its load."""


class Retire(Action):
    """A worker group that replaces another one serves: drain the other one."""


class Drain(Action):
    """A worker group is no longer wanted: let its requests end, then stop and forget it."""


class FailDeployment(Action):
    """The engine of a base could not start: undo the deployment and record why."""


class LoadVariant(Action):
    """Load a variant into the engine of its base."""


class UnloadVariant(Action):
    """Remove a variant from the engine of its base and forget its deployment."""


class StopGroup(Action):
    """Stop the engine of a worker group that belongs to no deployment, or to an earlier one."""


class Undeploy(Action):
    """Stop the engines of a base and forget its deployment."""


class Release(Action):
    """Release the reservations of a holder that is gone."""


class Cancel(Action):
    """Undo what an operation (the target is its id) began."""


class Forget(Action):
    """Drop operations that ended long ago. Their ends are kept for a day, for clients that repeat a
    request."""


class ForgetKeys(Action):
    """Drop idempotency keys, and ends of past operations, that are older than a day."""


TAKES_MEMORY = (Launch, Measure, Compress, LoadVariant, Replan, Scale)
KEEP_OPERATIONS = 1000
KEEP_KEYS_S = 24 * 3600.0
SEE_KEYS_EACH_S = 3600.0  # no process holds the keys in memory: a search reads all of them


def reconcile(state: State, observed: Observed) -> tuple[Action, ...]:
    wanted = [
        *_cancellations(state),
        *_profiles(state),
        *_deltas(state, observed),
        *_measurements(state),
        *_engines(state, observed),
        *_variants(state, observed),
        *_path(state, observed),
        *_orphans(state, observed),
        *(Release(holder) for holder in reservations.orphans(state)),
        *_leftovers(state, observed),
    ]
    if state.any_unreadable(NodeLedger):  # its reservations are unknown
        wanted = [action for action in wanted if not isinstance(action, TAKES_MEMORY)]
    once = {action.key: action for action in wanted}
    return tuple(action for key, action in once.items() if key not in observed.busy)


def _cancellations(state: State) -> Iterator[Action]:
    for operation in state.operations.values():
        if operation.record.cancel_requested and not operation.record.done:
            yield Cancel(operation.record.id)


def _profiles(state: State) -> Iterator[Action]:
    for versioned in state.models.values():
        model: Model = versioned.record
        if model.phase not in BEING_READ or _cancelled(state, OperationKind.REGISTER, model.name):
            continue
        if model.profile is None:
            yield ReadModel(model.name)
        elif _is_settled(state, model):
            yield Admit(model.name)


def _deltas(state: State, observed: Observed) -> Iterator[Action]:
    """Each delta that is to be made has an action, which waits for its turn itself. Its files are removed
    after that action has ended."""
    for name, versioned in state.models.items():
        phase = versioned.record.phase
        if phase is Phase.COMPRESSING and not _cancelled(state, OperationKind.REGISTER, name):
            yield Compress(name)
        elif phase is Phase.DELETING and not {Compress(name).key, ReadModel(name).key} & observed.busy:
            yield RemoveArtifact(name)


def _is_settled(state: State, model: Model) -> bool:
    """Whether there is nothing to wait for; a profile that no longer exists will not come."""
    if state.unreadable(ModelProfile, model.profile or ""):
        return False
    profile = state.profiles.get(model.profile or "")
    return profile is None or profile.record.settled


def _measurements(state: State) -> Iterator[Action]:
    for key, profile in state.profiles.items():
        if not profile.record.settled:
            yield Measure(key)
    requested: dict[str, Phase] = {}  # one at a time for each model
    for operation in state.operations.values():
        op = operation.record
        if op.kind is OperationKind.PROFILE and not op.done and not op.cancel_requested:
            requested.setdefault(op.target, op.phase)
    for name, phase in requested.items():
        model = state.models.get(name)
        if state.unreadable(Model, name):
            continue
        if phase is Phase.PENDING:
            yield BeginProfile(name)
        elif model is None or _is_settled(state, model.record):
            yield EndProfile(name)


def _cancelled(state: State, kind: OperationKind, target: str) -> bool:
    op = open_operation(state, kind, target)
    return op is not None and op.cancel_requested


def _engines(state: State, observed: Observed) -> Iterator[Action]:
    cluster = rescheduling.cluster_key(observed.nodes, state.ledgers)
    for base, versioned in state.deployments.items():
        deployment: Deployment = versioned.record
        if deployment.base != base or state.unreadable(Model, base):
            continue
        if deployment.phase is Phase.DELETING:
            yield Undeploy(base)
        elif not _cancelled(state, OperationKind.DEPLOY, base):
            if observed.wanted.get(base, autoscaling.active(deployment)) != autoscaling.active(deployment):
                yield Scale(base)
            for group in deployment.groups:
                yield from _group(deployment, group, cluster, observed)


def _group(deployment: Deployment, group: WorkerGroup, cluster: str, observed: Observed) -> Iterator[Action]:
    """The actions for one of a deployment's groups.

    A placement is recorded before its engine is launched: an engine without a placement was left by an
    earlier group of the same id. An engine that served and is gone (the cluster restarted) is launched again
    silently.
    """
    group_id = group_id_of(deployment.base, group.number)
    engine = observed.engines.get(group_id)
    if group.phase is GroupPhase.DRAINING:
        yield Drain(group_id)
    elif engine is None:
        failing = FailDeployment(deployment.base).key in observed.busy  # it may have just stopped the engine
        if not failing and rescheduling.due(group, cluster, observed.now_s):
            yield Launch(group_id)
    elif engine.status is EngineStatus.DELETING:
        return
    elif group.placement is None:
        if not {Launch(group_id).key, Replan(group_id).key} & observed.busy:
            yield StopGroup(group_id)
    elif _is_to_fail(deployment, group, engine, observed):
        yield FailDeployment(deployment.base)
    elif rescheduling.replacement_reason(group, engine, observed.nodes):
        yield Replan(group_id)
    elif _has_started(group, engine):
        if FailDeployment(deployment.base).key not in observed.busy:
            yield ConfirmServing(group_id)
    elif group.phase is GroupPhase.SERVING and is_spare(group, deployment.groups):
        yield Retire(group_id)


def _has_started(group: WorkerGroup, engine: EngineView) -> bool:
    return group.phase is GroupPhase.STARTING and engine.status is EngineStatus.RUNNING


def _is_to_fail(deployment: Deployment, group: WorkerGroup, engine: EngineView, observed: Observed) -> bool:
    """Whether to fail a deployment: none of its engines starts and its devices are fine, so the user must
    act."""
    views = (
        (other, observed.engines.get(group_id_of(deployment.base, other.number)))
        for other in deployment.groups
    )
    return (
        engine.status is EngineStatus.FAILED
        and not deployment.established
        and not any(view and _has_started(other, view) for other, view in views)
        and not rescheduling.replacement_reason(group, None, observed.nodes)
    )


def _variants(state: State, observed: Observed) -> Iterator[Action]:
    for name, versioned in state.deployments.items():
        deployment: Deployment = versioned.record
        if deployment.base == name or _base_is_unreadable(state, deployment.base):
            continue
        base = state.deployments.get(deployment.base)
        if deployment.phase is Phase.DELETING:
            yield UnloadVariant(name)
        elif base is None or base.record.phase is Phase.DELETING:
            yield FailDeployment(name)
        elif _may_load(state, deployment, base.record, observed):
            yield LoadVariant(name)


def _base_is_unreadable(state: State, base: str) -> bool:
    return state.unreadable(Deployment, base) or state.unreadable(Model, base)


def _may_load(state: State, variant: Deployment, base: Deployment, observed: Observed) -> bool:
    waiting = variant.phase is not Phase.DEPLOYED and _serves(base, observed)
    waiting = waiting and retrying.due(variant.loading, observed.now_s)
    return waiting and not _cancelled(state, OperationKind.DEPLOY, variant.model)


def _serves(base: Deployment, observed: Observed) -> bool:
    """Whether one of its groups can be reached. The others load the variant with its next request."""
    return base.phase is Phase.DEPLOYED and any(
        (engine := observed.engines.get(group_id)) is not None and engine.status is EngineStatus.RUNNING
        for group_id in base.serving_ids()
    )


def _path(state: State, observed: Observed) -> Iterator[Action]:
    if any(key.startswith(f"{MeasurePath.__name__}:") for key in observed.busy):
        return
    if path_measuring.is_due(state, observed.path_key, observed.now_s, observed.quiet):
        bases = sorted(
            base
            for base, versioned in state.deployments.items()
            if versioned.record.base == base and _serves(versioned.record, observed)
        )
        if bases:
            yield MeasurePath(path_measuring.next_base(state, observed.path_key, bases))


def _orphans(state: State, observed: Observed) -> Iterator[Action]:
    known = {
        group_id for deployment in state.deployments.values() for group_id in deployment.record.group_ids()
    }
    for group_id, engine in observed.engines.items():
        launching = Launch(group_id).key in observed.busy
        if state.unreadable(Deployment, base_of(group_id)):
            continue
        if group_id not in known and engine.status is not EngineStatus.DELETING and not launching:
            yield StopGroup(group_id)


def _leftovers(state: State, observed: Observed) -> Iterator[Action]:
    if old_operations(state):
        yield Forget("old operations")
    if observed.now_s - observed.keys_seen_s > SEE_KEYS_EACH_S:
        yield ForgetKeys("old keys")


def old_operations(state: State) -> list[str]:
    """Operations that need not be kept any longer, the oldest first. Each tenant has a share of the kept
    ones: a tenant with many operations does not displace the few of another tenant."""
    if len(state.operations) <= KEEP_OPERATIONS:
        return []
    ended = sorted((o.record.updated_at_s, o.record.id) for o in state.operations.values() if o.record.done)
    tenants = {name: state.operations[name].record.tenant for _, name in ended}
    counts = Counter(tenants.values())
    surplus = counts - Counter(fair_turns.shares(counts, KEEP_OPERATIONS))
    old = []
    for _, name in ended:
        if surplus[tenants[name]] > 0:
            surplus[tenants[name]] -= 1
            old.append(name)
    return old


def expired(record: IdempotencyKey | Operation, now_s: float) -> bool:
    """Whether a record is too old. A key and the operation that its request began have the same age."""
    return now_s - record.created_at_s > KEEP_KEYS_S
