"""From what is desired and what is observed to what must be done: one pure function.

The controller calls it on every change of either side; it never remembers anything itself, so a
controller that was killed continues where the records stand.
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
from controlplane.state.worker_groups import GroupPhase, WorkerGroup, group_id_of, host_of, is_spare

BEING_READ = (Phase.PENDING, Phase.PROFILING)  # phases of a model whose files are read next, or once more


@dataclass(frozen=True)
class Observed:
    """Engines by worker group. `busy` holds the keys of actions that are still being carried out, `wanted`
    how many groups a base's deployment should have by its load, where that is known. `path_key` says how the
    request path is set up (`profiling.request_paths`); empty: it is not measured. `quiet`: no requests are
    under way. `keys_seen_s`: when the idempotency keys were last seen through for expired ones;
    infinite: that is not asked."""

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
    """Something to do about `target`. Two actions with one key never run at once."""

    target: str

    @property
    def key(self) -> str:
        return f"{type(self).__name__}:{self.target}"


class ReadModel(Action):
    """Read and check a registered model's files."""


class Compress(Action):
    """Make the delta of a fine-tune."""


class RemoveArtifact(Action):
    """Take away what was made of a fine-tune, and forget its model."""


class Measure(Action):
    """Measure what a profile (the target is its key) lacks."""


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
    """The engine of a worker group runs: say so."""


class Replan(Action):
    """A worker group cannot go on where it is: stop it, to have it placed anew."""


class Scale(Action):
    """Give the deployment of a base as many groups as its load asks for."""


class Retire(Action):
    """A worker group serves that was to replace another: drain that one."""


class Drain(Action):
    """A worker group is not wanted any more: let its requests end, then stop and forget it."""


class FailDeployment(Action):
    """The engine of a base could not start: undo the deployment and say why."""


class LoadVariant(Action):
    """Bring a variant into the engine of its base."""


class UnloadVariant(Action):
    """Take a variant out of the engine of its base and forget its deployment."""


class StopGroup(Action):
    """Stop the engine of a worker group that no deployment has, or that was left by an earlier one."""


class Undeploy(Action):
    """Stop the engines of a base and forget its deployment."""


class Release(Action):
    """Release what is reserved for a holder that is gone."""


class Cancel(Action):
    """Undo what an operation (the target is its id) began."""


class Forget(Action):
    """Drop operations that ended long ago, but for how they ended: that is kept for a day, for who repeats a
    request."""


class ForgetKeys(Action):
    """Drop idempotency keys, and what became of past operations, of more than a day ago."""


TAKES_MEMORY = (Launch, Measure, Compress, LoadVariant, Replan, Scale)
KEEP_OPERATIONS = 1000
KEEP_KEYS_S = 24 * 3600.0
SEE_KEYS_EACH_S = 3600.0  # nobody holds them: all are read


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
    if state.any_unreadable(NodeLedger):  # nobody knows what memory is promised there
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
    """Each that is to be made has an action, which waits for its turn itself. Its files are taken away when
    that has ended."""
    for name, versioned in state.models.items():
        phase = versioned.record.phase
        if phase is Phase.COMPRESSING and not _cancelled(state, OperationKind.REGISTER, name):
            yield Compress(name)
        elif phase is Phase.DELETING and not {Compress(name).key, ReadModel(name).key} & observed.busy:
            yield RemoveArtifact(name)


def _is_settled(state: State, model: Model) -> bool:
    """Whether there is nothing to wait for; a profile that is gone will not come."""
    if state.unreadable(ModelProfile, model.profile or ""):
        return False
    profile = state.profiles.get(model.profile or "")
    return profile is None or profile.record.settled


def _measurements(state: State) -> Iterator[Action]:
    for key, profile in state.profiles.items():
        if not profile.record.settled:
            yield Measure(key)
    requested: dict[str, Phase] = {}  # one at a time of each model
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
    for host, versioned in state.deployments.items():
        deployment: Deployment = versioned.record
        if deployment.host != host or state.unreadable(Model, host):
            continue
        if deployment.phase is Phase.DELETING:
            yield Undeploy(host)
        elif not _cancelled(state, OperationKind.DEPLOY, host):
            if observed.wanted.get(host, autoscaling.active(deployment)) != autoscaling.active(deployment):
                yield Scale(host)
            for group in deployment.groups:
                yield from _group(deployment, group, cluster, observed)


def _group(deployment: Deployment, group: WorkerGroup, cluster: str, observed: Observed) -> Iterator[Action]:
    """What is to be done about one of a deployment's groups.

    A placement is written down before its engine is launched: an engine without one was left by an
    earlier group of the same id. One that serves and is gone (the cluster restarted) is launched
    again, without a word.
    """
    group_id = group_id_of(deployment.host, group.number)
    engine = observed.engines.get(group_id)
    if group.phase is GroupPhase.DRAINING:
        yield Drain(group_id)
    elif engine is None:
        failing = FailDeployment(deployment.host).key in observed.busy  # which may have stopped it just now
        if not failing and rescheduling.due(group, cluster, observed.now_s):
            yield Launch(group_id)
    elif engine.status is EngineStatus.DELETING:
        return
    elif group.placement is None:
        if not {Launch(group_id).key, Replan(group_id).key} & observed.busy:
            yield StopGroup(group_id)
    elif _is_to_fail(deployment, group, engine, observed):
        yield FailDeployment(deployment.host)
    elif rescheduling.replacement_reason(group, engine, observed.nodes):
        yield Replan(group_id)
    elif _has_started(group, engine):
        if FailDeployment(deployment.host).key not in observed.busy:
            yield ConfirmServing(group_id)
    elif group.phase is GroupPhase.SERVING and is_spare(group, deployment.groups):
        yield Retire(group_id)


def _has_started(group: WorkerGroup, engine: EngineView) -> bool:
    return group.phase is GroupPhase.STARTING and engine.status is EngineStatus.RUNNING


def _is_to_fail(deployment: Deployment, group: WorkerGroup, engine: EngineView, observed: Observed) -> bool:
    """A deployment no engine of which starts, where nothing is wrong with the devices, is its user's."""
    views = (
        (other, observed.engines.get(group_id_of(deployment.host, other.number)))
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
        if deployment.host == name or _host_is_unreadable(state, deployment.host):
            continue
        host = state.deployments.get(deployment.host)
        if deployment.phase is Phase.DELETING:
            yield UnloadVariant(name)
        elif host is None or host.record.phase is Phase.DELETING:
            yield FailDeployment(name)
        elif _may_load(state, deployment, host.record, observed):
            yield LoadVariant(name)


def _host_is_unreadable(state: State, host: str) -> bool:
    return state.unreadable(Deployment, host) or state.unreadable(Model, host)


def _may_load(state: State, variant: Deployment, host: Deployment, observed: Observed) -> bool:
    waiting = variant.phase is not Phase.DEPLOYED and _serves(host, observed)
    waiting = waiting and retrying.due(variant.loading, observed.now_s)
    return waiting and not _cancelled(state, OperationKind.DEPLOY, variant.model)


def _serves(host: Deployment, observed: Observed) -> bool:
    """Whether one of its groups can be reached. The others load the variant with its next request."""
    return host.phase is Phase.DEPLOYED and any(
        (engine := observed.engines.get(group_id)) is not None and engine.status is EngineStatus.RUNNING
        for group_id in host.serving_ids()
    )


def _path(state: State, observed: Observed) -> Iterator[Action]:
    if any(key.startswith(f"{MeasurePath.__name__}:") for key in observed.busy):
        return
    if path_measuring.is_due(state, observed.path_key, observed.now_s, observed.quiet):
        hosts = sorted(
            host
            for host, versioned in state.deployments.items()
            if versioned.record.host == host and _serves(versioned.record, observed)
        )
        if hosts:
            yield MeasurePath(path_measuring.next_host(state, observed.path_key, hosts))


def _orphans(state: State, observed: Observed) -> Iterator[Action]:
    known = {
        group_id for deployment in state.deployments.values() for group_id in deployment.record.group_ids()
    }
    for group_id, engine in observed.engines.items():
        launching = Launch(group_id).key in observed.busy
        if state.unreadable(Deployment, host_of(group_id)):
            continue
        if group_id not in known and engine.status is not EngineStatus.DELETING and not launching:
            yield StopGroup(group_id)


def _leftovers(state: State, observed: Observed) -> Iterator[Action]:
    if old_operations(state):
        yield Forget("old operations")
    if observed.now_s - observed.keys_seen_s > SEE_KEYS_EACH_S:
        yield ForgetKeys("old keys")


def old_operations(state: State) -> list[str]:
    """Those that need not be kept any more, the oldest first. Of those that are kept each tenant has its
    share: nobody's many push out another's few."""
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
    """A key and the operation that its request began are as old as each other."""
    return now_s - record.created_at_s > KEEP_KEYS_S
