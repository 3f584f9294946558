"""The controller: carries out the actions of `reconcile`, and records their results.

It keeps no state that it could lose: after it was killed at any point, its successor reads the records,
observes the engines and continues. Only one action per key runs at a time. A failed action is repeated after
a pause, which grows while it fails in a row. The open operation about its target shows why.
"""

from __future__ import annotations

import asyncio
import logging
import time
import traceback
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

from controlplane import errors
from controlplane.cluster.engine_status import EngineStatus, EngineView
from controlplane.cluster.inventory import NodeState, inventory_of
from controlplane.cluster.memory_usage import memory_by_node
from controlplane.controller import file_reader, registration
from controlplane.controller.child_process import ReaderDied
from controlplane.controller.compress_action import MADE_SHARE, CompressActions
from controlplane.controller.demand import DemandBook
from controlplane.controller.deployment_actions import DeploymentActions
from controlplane.controller.fetch_action import FetchAction
from controlplane.controller.forgetting import Forgetting
from controlplane.controller.group_actions import GroupActions
from controlplane.controller.interfaces import ClusterControl, Hooks
from controlplane.controller.metrics import ControllerMetrics, set_counts
from controlplane.controller.path_action import PathAction
from controlplane.controller.profile_actions import ProfileActions
from controlplane.controller.transitions import (
    end_open_operations,
    fail_registration,
    note_open_operations,
    undo_operation,
)
from controlplane.gateway.audit import AuditLog
from controlplane.planning import rescheduling, retrying
from controlplane.planning.reconcile import (
    BEING_READ,
    Action,
    Admit,
    BeginProfile,
    Cancel,
    Compress,
    ConfirmServing,
    Drain,
    EndProfile,
    FailDeployment,
    Forget,
    ForgetKeys,
    Launch,
    LoadVariant,
    Measure,
    MeasurePath,
    Observed,
    ReadModel,
    Release,
    RemoveArtifact,
    Replan,
    Retire,
    Scale,
    StopGroup,
    Undeploy,
    UnloadVariant,
    reconcile,
)
from controlplane.planning.retrying import RetryLimits
from controlplane.profiling import request_paths
from controlplane.repeated_lines import REPEATED, Rarely
from controlplane.settings import Settings
from controlplane.state.installation import require_theirs
from controlplane.state.operations import End, advance, open_operation
from controlplane.state.queries import require_host_bytes
from controlplane.state.records import Model, Operation, OperationKind, Phase
from controlplane.state.repository import Change, Repository, State
from controlplane.state.transactions import Superseded, edit, persist
from controlplane.state.worker_groups import base_of

log = logging.getLogger(__name__)
log.addFilter(Rarely())

TICK_S = 0.1
OBSERVE_EVERY_S = 1.0
RETRY_S = 3.0  # pause after an action that failed; it doubles each time
MAX_RETRY_S = 60.0
ENDING_S = 15.0  # the longest time that cancelled actions have to end
MAX_READS = 3  # attempts to read a model's files, if the reading process never survives
# Actions whose failures are recorded in open operations. (LoadVariant counts its attempts in its own record.)
OPERATION_OF: Mapping[type[Action], OperationKind] = {
    ReadModel: OperationKind.REGISTER,
    Admit: OperationKind.REGISTER,
    Compress: OperationKind.REGISTER,
    RemoveArtifact: OperationKind.DELETE,
    BeginProfile: OperationKind.PROFILE,
    EndProfile: OperationKind.PROFILE,
    Launch: OperationKind.DEPLOY,
    ConfirmServing: OperationKind.DEPLOY,
    FailDeployment: OperationKind.DEPLOY,
    LoadVariant: OperationKind.DEPLOY,
    UnloadVariant: OperationKind.UNDEPLOY,
    Undeploy: OperationKind.UNDEPLOY,
}


class Controller:
    """`run` until cancelled. All state is in `repository`; all effects go through `cluster`."""

    def __init__(
        self, settings: Settings, repository: Repository, cluster: ClusterControl, metrics: ControllerMetrics
    ) -> None:
        self._settings = settings
        self._repository = repository
        self._cluster = cluster
        self._metrics = metrics
        self._audit = AuditLog(settings, metrics.audit_lost)
        self._admitting = asyncio.Lock()
        self._files = file_reader.shared()
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._failures: Counter[str] = Counter()  # in a row, by key of unfinished actions
        self._engines: dict[str, EngineView] = {}
        self._identity = ""  # the store's, after an engine with an identity was seen
        self._profiles = ProfileActions(settings, repository, cluster, self._note, self._conclude)
        self._demand = DemandBook()
        self._fetching = FetchAction(settings, repository, cluster, self._note)
        hooks = Hooks(self._note, self._conclude, self._view, self._demand.wanted, self._fetching.ensure)
        self._compressing = CompressActions(settings, repository, cluster, hooks)
        self._groups = GroupActions(settings, repository, cluster, hooks, self._fail_all)
        self._deployments = DeploymentActions(repository, cluster, hooks, self._groups.stop)
        self._forgetting = Forgetting(repository)
        self._do: dict[type[Action], Callable[[str], Awaitable[None]]] = {
            ReadModel: self._read_model,
            Admit: self._profiles.admit,
            Compress: self._compressing.compress,
            RemoveArtifact: self._compressing.remove,
            Measure: self._profiles.measure,
            MeasurePath: PathAction(settings, repository, cluster).measure,
            BeginProfile: self._profiles.begin,
            EndProfile: self._profiles.end,
            Launch: self._launch,
            ConfirmServing: self._groups.confirm,
            Replan: self._groups.replan,
            Retire: self._groups.retire,
            Scale: self._groups.scale,
            Drain: self._groups.drain,
            StopGroup: self._groups.stop,
            FailDeployment: self._deployments.fail,
            LoadVariant: self._deployments.load_variant,
            UnloadVariant: self._deployments.unload_variant,
            Undeploy: self._deployments.undeploy,
            Release: self._groups.release,
            Cancel: self._cancel,
            Forget: self._forgetting.operations,
            ForgetKeys: self._forgetting.keys,
        }

    async def run(self) -> None:
        """Reconcile on every change of the records, and every second for changes outside."""
        try:
            await self._reconcile_forever()
        finally:
            tasks = list(self._tasks.values())
            for task in tasks:
                task.cancel()
            if tasks:  # before another controller of this process starts the same actions
                await asyncio.wait(tasks, timeout=ENDING_S)

    async def _reconcile_forever(self) -> None:
        revision, observed_at = -1, 0.0
        while True:
            try:
                now = await asyncio.to_thread(self._repository.revision)
                if now != revision or time.monotonic() - observed_at > OBSERVE_EVERY_S:
                    revision = now
                    await self.step()
                    observed_at = time.monotonic()
            except errors.Unavailable as e:
                log.warning(
                    "the controller waits, because it cannot use the state store: %s", e, extra=REPEATED
                )
            except Exception as e:  # each one is logged once a minute
                where = traceback.extract_tb(e.__traceback__)[-1]
                what = f"{type(e).__name__} in {where.name}, line {where.lineno}"
                log.exception(f"reconciling failed ({what}); the controller tries again", extra=REPEATED)
                await asyncio.sleep(OBSERVE_EVERY_S)
            await asyncio.sleep(TICK_S)

    async def step(self) -> None:
        """Look once, and start the actions that are due."""
        busy = frozenset(self._tasks)  # before looking: the result of an action that ends now may be unseen
        engines = await self._cluster.observe()
        await self._require_own(engines)
        nodes = await self._cluster.nodes(wait=False)
        state = await self._repository.read_async()
        now_s, deployments = time.time(), [versioned.record for versioned in state.deployments.values()]
        self._engines = rescheduling.mark_start_timeouts(
            engines, deployments, now_s, self._settings.start_limit_s
        )
        self._report(state, nodes)
        demand = self._cluster.demand()
        wanted = self._demand.note(deployments, demand, now_s)
        path_key = request_paths.path_key(self._settings, inventory_of(nodes).devices)
        quiet = demand is not None and not any(demand.values())
        keys_seen_s = self._forgetting.keys_seen_s
        observed = Observed(self._engines, busy, now_s, tuple(nodes), wanted, path_key, quiet, keys_seen_s)
        actions = reconcile(state, observed)
        self._forget_failures({*busy, *self._tasks, *(action.key for action in actions)})
        for action in actions:
            self._tasks[action.key] = asyncio.create_task(self._carry_out(action))

    async def _require_own(self, engines: Mapping[str, EngineView]) -> None:
        """Errors: NotOwn if engines run that were launched from another store."""
        running = {e.installation for e in engines.values() if e.status is not EngineStatus.DELETING}
        if running - {self._identity, ""}:
            self._identity = await asyncio.to_thread(self._repository.installation)
            if self._identity:
                require_theirs(self._identity, False, running)

    async def settle(self) -> None:
        """Wait for all actions that run now."""
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    async def _fail_all(self, base: str, error: errors.OstinatoError) -> None:
        await self._deployments.fail_all(base, error)

    def _view(self, group_id: str) -> EngineView | None:
        return self._engines.get(group_id)

    def _report(self, state: State, nodes: Sequence[NodeState]) -> None:
        self._metrics.devices.show(memory_by_node(nodes, state.ledgers, self._settings.headroom))
        set_counts(self._metrics.deployments, (d.record.phase for d in state.deployments.values()), Phase)
        set_counts(self._metrics.models, (m.record.phase for m in state.models.values()), Phase)
        set_counts(self._metrics.engines, (e.status for e in self._engines.values()), EngineStatus)

    async def _carry_out(self, action: Action) -> None:
        kind, outcome = type(action).__name__, "ok"
        try:
            await self._do[type(action)](action.target)
            self._failures.pop(action.key, None)
        except Superseded as e:
            log.info("%s is no longer needed: %s is gone", action.key, e)
            self._failures.pop(action.key, None)
        except Exception as e:
            outcome = "failed"
            await self._pause(action, e)
        finally:
            self._metrics.actions.labels(kind, outcome).inc()
            self._tasks.pop(action.key, None)

    async def _pause(self, action: Action, error: Exception) -> None:
        """Pause before a failed action is repeated; meanwhile its operation shows why."""
        self._failures[action.key] += 1
        limits = RetryLimits(first_pause_s=RETRY_S, max_pause_s=MAX_RETRY_S)
        pause_s = retrying.pause_s(self._failures[action.key], limits, action.key)
        log.warning("%s failed; the controller tries again in %.0f s: %r", action.key, pause_s, error)
        if (kind := OPERATION_OF.get(type(action))) is not None:
            message = f"{retrying.cause(error)}; the controller tries again after {pause_s:.0f} s"
            with suppress(Exception):  # the store may be what failed
                await asyncio.to_thread(persist, lambda: self._tell(kind, base_of(action.target), message))
        await asyncio.sleep(pause_s)

    def _forget_failures(self, keys: Collection[str]) -> None:
        """Forget the failures of all actions except these, which are due or running."""
        self._failures = Counter({key: count for key, count in self._failures.items() if key in keys})

    def _tell(self, kind: OperationKind, target: str, message: str) -> None:
        told = note_open_operations(self._repository.read(), kind, target, message, time.time())
        if told:
            self._repository.commit(told)

    # --- records -------------------------------------------------------------------------------

    async def _edit_model(self, name: str, change: Callable[[Model], Model]) -> Model:
        return (await asyncio.to_thread(edit, self._repository, Model, name, change)).record

    async def _note(
        self, kind: OperationKind, target: str, phase: Phase, message: str, progress: float | None = None
    ) -> None:
        """Add an event to the open operation of `target`, if there is one."""
        operation = open_operation(await self._repository.read_async(), kind, target)
        if operation is None:
            return
        now_s = time.time()
        with suppress(Superseded):
            await asyncio.to_thread(
                edit,
                self._repository,
                Operation,
                operation.id,
                lambda o: o if o.done else advance(o, phase, message, now_s, progress),
            )

    async def _conclude(
        self, kind: OperationKind, target: str, end: End, change: Callable[[State], Sequence[Change]]
    ) -> None:
        """Change records and end the open operations about `target`, in one commit.

        Raises Superseded when `change` does, and for the success of an operation that is to be cancelled.
        """

        def once() -> list[Change]:
            state = self._repository.read()
            changes = [*change(state), *end_open_operations(state, kind, target, end)]
            self._repository.commit(changes)
            return changes

        await asyncio.to_thread(lambda: self._audit.ends(persist(once)))

    # --- registration --------------------------------------------------------------------------

    async def _read_model(self, name: str) -> None:
        """Read a model's files, and continue with the result. An attempt that killed its process counts."""
        if not await self._fetched(name):
            return
        counted: list[int] = []

        def begin(model: Model) -> Model:
            counted.append(model.uid)
            return _being_read(model)

        try:
            await self._read_counted(await self._edit_model(name, begin))
        except _KilledReader:
            raise
        except (Exception, asyncio.CancelledError):  # its files are not the cause
            if counted:
                await self._do_not_count(name, counted[-1])
            raise

    async def _fetched(self, name: str) -> bool:
        """Fetch a model's files if they are remote. A failure that a repetition would not help ends the
        registration."""
        try:
            await self._fetching.registered(name)
        except (errors.Unavailable, errors.StaleWrite, Superseded):
            raise
        except errors.OstinatoError as e:
            versioned = (await self._repository.read_async()).models.get(name)
            if versioned is not None:
                await self._fail_registration(versioned.record, e)
            return False
        return True

    async def _launch(self, group_id: str) -> None:
        await self._renew(base_of(group_id))
        await self._groups.launch(group_id)

    async def _renew(self, name: str) -> None:
        """Read the files of a base again if it was registered by a version that did not read its chat format,
        nor a head that its config denies."""
        versioned = (await self._repository.read_async()).models.get(name)
        if versioned is None or versioned.record.chat is not None or versioned.record.spec is None:
            return
        model = versioned.record
        try:
            read = await self._files.read(model, None, self._limits(model), self._cluster.convert_bundled)
        except (ReaderDied, errors.OstinatoError) as e:  # the engine then fails to start and reports why
            log.warning("the files of '%s', which an older version registered, cannot be read: %s", name, e)
            return
        await self._edit_model(name, partial(_renewed, read=read))

    def _limits(self, model: Model) -> registration.Limits:
        compares = self._settings.engine == "vllm"
        return registration.Limits(self._roots(model), self._settings.max_lora_rank, compares)

    def _roots(self, model: Model) -> tuple[Path, ...]:
        """The folders that may hold its files: also the artifacts folder, for a delta that was made here, and
        the folder that its files were fetched into."""
        made_here = model.delta is not None and model.adapter is not None
        roots = self._settings.roots_of(model.tenant)
        fetched = (Path(model.fetched.folder).resolve(),) if model.fetched is not None else ()
        made = (self._settings.artifacts_folder.resolve(),) if made_here else ()
        return (*roots, *fetched, *made)

    async def _read_counted(self, model: Model) -> None:
        await self._note(
            OperationKind.REGISTER, model.name, Phase.PROFILING, "reading the files", _read_share(model)
        )
        limits = self._limits(model)
        versioned = (await self._repository.read_async()).models.get(model.base or "")
        base = versioned.record if versioned else None
        try:
            if model.reads > MAX_READS:
                raise errors.SourceUnreadable(_read_in_vain("the controller ended"))
            ready = await self._files.read(model, base, limits, self._cluster.convert_bundled)
        except ReaderDied as e:
            if model.reads < MAX_READS:
                raise _KilledReader(f"reading the files failed: {e}") from e
            await self._fail_registration(model, errors.SourceUnreadable(_read_in_vain(str(e))))
            return
        except Exception as e:  # reading the same files again would fail, too
            if not isinstance(e, errors.OstinatoError):
                log.exception("reading '%s' failed", model.name)
                e = registration.unexpected(e)
            await self._fail_registration(model, e)
            return
        ready = replace(ready, reads=0)
        if ready.phase is Phase.COMPRESSING:
            await self._compressing.begin(ready)
        elif ready.max_host_bytes is None:
            await self._profiles.admit_or_measure(ready)
        else:
            await self._admit_within(ready)

    async def _admit_within(self, ready: Model) -> None:
        """Admit a variant if its tenant has room. Variants are admitted one after the other, so that each
        counts the earlier ones."""
        async with self._admitting:
            try:
                require_host_bytes(await self._repository.read_async(), ready)
            except errors.QuotaExceeded as e:
                await self._fail_registration(ready, e)
                return
            await self._profiles.admit_or_measure(ready)

    async def _do_not_count(self, name: str, uid: int) -> None:
        """Take the attempt back, even while this controller ends."""

        def take_back() -> None:
            with suppress(Exception):  # then the attempt counts
                edit(self._repository, Model, name, lambda m: _not_read(m, uid))

        await asyncio.shield(asyncio.to_thread(take_back))

    async def _fail_registration(self, model: Model, error: errors.OstinatoError) -> None:
        await self._conclude(
            OperationKind.REGISTER,
            model.name,
            End.failed(error),
            lambda s: fail_registration(s, model.name, model.uid, error.message),
        )

    # --- cancelling ----------------------------------------------------------------------------

    async def _cancel(self, operation_id: str) -> None:
        operation = (await self._repository.read_async()).operations.get(operation_id)
        if operation is None or operation.record.done:
            return
        op = operation.record
        message = "cancelled; nothing was registered"
        if op.kind is OperationKind.PROFILE:
            message = "cancelled; finished measurements are kept"
        if op.kind is OperationKind.DEPLOY:
            message = "cancelled; nothing is deployed"
            await self._deployments.stop_cancelled(op.target)
        await self._conclude(
            op.kind, op.target, End(Phase.CANCELLED, message), lambda s: undo_operation(s, op.id)
        )


class _KilledReader(errors.Unavailable):
    """The reading process died; the attempt is repeated, and counts."""


def _renewed(now: Model, *, read: Model) -> Model:
    """Add what an older version did not read. Estimates and names of the model stay."""
    return replace(now, spec=read.spec, chat=read.chat) if now.uid == read.uid else now


def _being_read(model: Model) -> Model:
    """Raises Superseded if the model is read or to be deleted: a killed controller's thread may be late."""
    if model.phase not in BEING_READ:
        raise Superseded(model.name)
    return replace(model, phase=Phase.PROFILING, reads=model.reads + 1)


def _not_read(model: Model, uid: int) -> Model:
    same = model.uid == uid and model.phase is Phase.PROFILING
    return replace(model, reads=max(0, model.reads - 1)) if same else model


def _read_in_vain(last: str) -> str:
    return (
        f"the process that reads the files failed {MAX_READS} times (the last time: {last}); check that these"
        " files belong to the model, and register it again"
    )


def _read_share(model: Model) -> float:
    """The part of a registration that is complete when a model's files are read."""
    if model.delta is None:
        return 0.3
    return MADE_SHARE if model.delta.artifact else 0.0
