"""The controller: carries out what `reconcile` says, and writes down what became of it.

It keeps nothing it could lose: killed at any point, its successor reads the records, observes the
engines and goes on. Only one action per key runs at once; a failed one is tried again after a pause.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import Protocol

from prometheus_client import Gauge

from controlplane import deploying, errors, fetching, store_edits
from controlplane.commands import advance
from controlplane.metrics import ControllerMetrics
from controlplane.reconcile import (
    Action,
    Cancel,
    ConfirmDeployed,
    EngineStatus,
    EngineView,
    FailDeployment,
    Forget,
    Launch,
    LoadVariant,
    Observed,
    Profile,
    StopEngine,
    UnloadVariant,
    open_operation,
    reconcile,
)
from controlplane.records import Deployment, IdempotencyKey, Model, Operation, OperationKind, Phase
from controlplane.routing import variant_ref
from controlplane.settings import Settings
from controlplane.state.typed import Delete, Put, Repository, State
from controlplane.store_edits import Gone, edit
from placement.types import Inventory
from workers.messages import EngineConfig, VariantRef

log = logging.getLogger(__name__)

TICK_S = 0.1
OBSERVE_EVERY_S = 1.0
RETRY_S = 3.0


class Runtime(Protocol):
    """What the controller needs of the cluster."""

    async def launch(self, config: EngineConfig) -> None: ...

    async def stop(self, host: str) -> None: ...

    async def observe(self) -> dict[str, EngineView]: ...

    async def load_variant(self, host: str, variant: VariantRef) -> None: ...

    async def unload_variant(self, host: str, variant: VariantRef) -> None: ...

    async def inventory(self) -> Inventory: ...

    def convert_bundled(self, name: str) -> Path:
        """Blocking; called in a thread."""
        ...


class Controller:
    """`run` until cancelled. All state is in `repository`; all effects go through `runtime`."""

    def __init__(
        self, settings: Settings, repository: Repository, runtime: Runtime, metrics: ControllerMetrics
    ) -> None:
        self._settings = settings
        self._repository = repository
        self._runtime = runtime
        self._metrics = metrics
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._engines: dict[str, EngineView] = {}
        self._do: dict[type[Action], Callable[[str], Awaitable[None]]] = {
            Profile: self._profile,
            Launch: self._launch,
            ConfirmDeployed: self._confirm,
            FailDeployment: self._fail_deployment,
            LoadVariant: self._load_variant,
            UnloadVariant: self._unload_variant,
            StopEngine: self._stop_engine,
            Cancel: self._cancel,
            Forget: self._forget,
        }

    async def run(self) -> None:
        """Reconcile on every change of the records, and every second for what changed outside."""
        revision, observed_at = -1, 0.0
        while True:
            try:
                now = await asyncio.to_thread(self._repository.revision)
                if now != revision or time.monotonic() - observed_at > OBSERVE_EVERY_S:
                    revision = now
                    await self.step()
                    observed_at = time.monotonic()
            except errors.Unavailable as e:
                log.warning("the state store is away: %s", e)
            except Exception:
                log.exception("reconciling failed; trying again")
                await asyncio.sleep(OBSERVE_EVERY_S)
            await asyncio.sleep(TICK_S)

    async def step(self) -> None:
        """Look once, and start what is to be done."""
        self._engines = dict(await self._runtime.observe())
        state = await asyncio.to_thread(self._repository.read)
        self._report(state)
        observed = Observed(self._engines, frozenset(self._tasks), time.time())
        for action in reconcile(state, observed):
            self._tasks[action.key] = asyncio.create_task(self._carry_out(action))

    async def settle(self) -> None:
        """Wait for all actions that run now."""
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    def _report(self, state: State) -> None:
        _gauge(self._metrics.deployments, (d.record.phase for d in state.deployments.values()), Phase)
        _gauge(self._metrics.models, (m.record.phase for m in state.models.values()), Phase)
        _gauge(self._metrics.engines, (e.status for e in self._engines.values()), EngineStatus)

    async def _carry_out(self, action: Action) -> None:
        kind, outcome = type(action).__name__, "ok"
        try:
            await self._do[type(action)](action.target)
        except Gone as e:
            log.info("%s is moot: %s is gone", action.key, e)
        except Exception as e:
            outcome = "failed"
            log.warning("%s failed, trying again in %.0f s: %r", action.key, RETRY_S, e)
            await asyncio.sleep(RETRY_S)
        finally:
            self._metrics.actions.labels(kind, outcome).inc()
            self._tasks.pop(action.key, None)

    # --- records -------------------------------------------------------------------------------

    async def _edit_model(self, name: str, change: Callable[[Model], Model]) -> Model:
        return (await asyncio.to_thread(edit, self._repository, Model, name, change)).record

    async def _edit_deployment(self, name: str, change: Callable[[Deployment], Deployment]) -> Deployment:
        return (await asyncio.to_thread(edit, self._repository, Deployment, name, change)).record

    async def _read(self) -> State:
        return await asyncio.to_thread(self._repository.read)

    async def _note(
        self, kind: OperationKind, target: str, phase: Phase, message: str, progress: float | None = None
    ) -> None:
        """Add an event to the open operation of `target`, if there is one."""
        operation = open_operation(await self._read(), kind, target)
        if operation is None:
            return
        now_s = time.time()
        with suppress(Gone):
            await asyncio.to_thread(
                edit,
                self._repository,
                Operation,
                operation.id,
                lambda o: o if o.done else advance(o, phase, message, now_s, progress),
            )

    async def _end(
        self,
        kind: OperationKind,
        target: str,
        forget: type[Model] | type[Deployment],
        error: errors.OstinatoError,
    ) -> None:
        """Delete a record and fail its operation, in one commit: nothing stays half-registered."""
        await self._close(kind, target, forget, Phase.FAILED, error.message, error)

    async def _close(
        self,
        kind: OperationKind,
        target: str,
        forget: type[Model] | type[Deployment],
        phase: Phase,
        message: str,
        error: errors.OstinatoError | None = None,
    ) -> None:
        def close() -> None:
            state = self._repository.read()
            records = state.models if forget is Model else state.deployments
            changes: list[Put | Delete] = []
            if (found := records.get(target)) is not None:
                changes.append(Delete(forget, target, found.version))
            operation = open_operation(state, kind, target)
            if operation is not None:
                ended = advance(operation, phase, message, time.time(), 1.0)
                ended = replace(ended, error=error.body() if error else None)
                changes.append(Put(ended, state.operations[operation.id].version))
            self._repository.commit(changes)

        await asyncio.to_thread(_persist, close)

    # --- registration --------------------------------------------------------------------------

    async def _profile(self, name: str) -> None:
        model = await self._edit_model(name, lambda m: replace(m, phase=Phase.PROFILING))
        await self._note(OperationKind.REGISTER, name, Phase.PROFILING, "reading its files", 0.3)
        limits = fetching.Limits(self._settings.roots, self._settings.max_lora_rank)
        found = (await self._read()).models.get(model.base or "")
        base = found.record if found else None
        try:
            ready = await asyncio.to_thread(
                fetching.profile, model, base, limits, self._runtime.convert_bundled
            )
        except errors.OstinatoError as e:
            await self._end(OperationKind.REGISTER, name, Model, e)
            return
        await self._edit_model(name, lambda m: m if m.uid != ready.uid else ready)
        await self._note(OperationKind.REGISTER, name, Phase.READY, ready.reason, 1.0)

    # --- deployment ----------------------------------------------------------------------------

    async def _launch(self, host: str) -> None:
        state = await self._read()
        if host not in state.models or host not in state.deployments:
            raise Gone(host)
        model, deployment = state.models[host].record, state.deployments[host].record
        try:
            placement = deploying.decide(model, deployment, await self._runtime.inventory(), self._settings)
        except errors.NoFeasiblePlan as e:
            await self._fail_group(state, host, e)
            return
        config = deploying.engine_config(model, placement, self._settings)
        await self._edit_deployment(
            host, lambda d: replace(d, phase=Phase.DEPLOYING, placement=placement, reason="engine starting")
        )
        await self._tell_waiting(host, f"{placement.reason}; starting the engine", 0.3)
        await self._runtime.launch(config)

    async def _tell_waiting(self, host: str, message: str, progress: float) -> None:
        """Tell the operations of a base and of the variants that wait for it."""
        for found in (await self._read()).deployments.values():
            d = found.record
            if d.host == host and d.phase in (Phase.PENDING, Phase.DEPLOYING):
                await self._note(OperationKind.DEPLOY, d.model, Phase.DEPLOYING, message, progress)

    async def _confirm(self, host: str) -> None:
        await self._edit_deployment(
            host, lambda d: replace(d, phase=Phase.DEPLOYED, reason="") if _live(d) else d
        )
        await self._note(OperationKind.DEPLOY, host, Phase.DEPLOYED, "the engine answers", 1.0)

    async def _fail_deployment(self, name: str) -> None:
        state = await self._read()
        if name not in state.deployments:
            raise Gone(name)
        if state.deployments[name].record.host != name:
            error: errors.OstinatoError = errors.EngineFailed(f"the base of '{name}' could not be deployed")
            await self._end(OperationKind.DEPLOY, name, Deployment, error)
            return
        view = self._engines.get(name)
        detail = _readable(view.message) if view else "no reason given"
        error = errors.EngineFailed(f"the engine of '{name}' could not start: {detail}")
        await self._runtime.stop(name)
        await self._fail_group(state, name, error)

    async def _fail_group(self, state: State, host: str, error: errors.OstinatoError) -> None:
        """End the deployments of a base and of all its variants with the same error."""
        group = [d.record.model for d in state.deployments.values() if d.record.host == host]
        for name in sorted(group, key=lambda n: n == host):
            await self._end(OperationKind.DEPLOY, name, Deployment, error)

    async def _stop_engine(self, host: str) -> None:
        await self._note(OperationKind.UNDEPLOY, host, Phase.DELETING, "stopping the engine", 0.3)
        await self._runtime.stop(host)
        await self._forget_deployment(host)

    async def _forget_deployment(self, name: str) -> None:
        """Delete a deployment that was to be deleted; end what was going on with it."""
        found = (await self._read()).deployments.get(name)
        if found is None or found.record.phase is not Phase.DELETING:
            return
        message = "undeployed while it was being deployed"
        await self._note(OperationKind.DEPLOY, name, Phase.CANCELLED, message, 1.0)
        await self._close(OperationKind.UNDEPLOY, name, Deployment, Phase.DELETED, "undeployed")

    # --- variants ------------------------------------------------------------------------------

    async def _variant(self, name: str) -> tuple[str, VariantRef]:
        state = await self._read()
        if name not in state.deployments or name not in state.models:
            raise Gone(name)
        return state.deployments[name].record.host, variant_ref(state.models[name].record)

    async def _load_variant(self, name: str) -> None:
        host, variant = await self._variant(name)
        await self._note(
            OperationKind.DEPLOY, name, Phase.DEPLOYING, f"loading it into the engine of '{host}'", 0.7
        )
        try:
            await self._runtime.load_variant(host, variant)
        except errors.AdapterMismatch as e:
            await self._end(OperationKind.DEPLOY, name, Deployment, e)
            return
        await self._edit_deployment(
            name, lambda d: replace(d, phase=Phase.DEPLOYED, reason="") if _live(d) else d
        )
        message = f"served by the engine of '{host}', in one batch with it"
        await self._note(OperationKind.DEPLOY, name, Phase.DEPLOYED, message, 1.0)

    async def _unload_variant(self, name: str) -> None:
        host, variant = await self._variant(name)
        await self._note(OperationKind.UNDEPLOY, name, Phase.DELETING, f"unloading it from '{host}'", 0.5)
        await self._runtime.unload_variant(host, variant)
        await self._forget_deployment(name)

    # --- cancelling and forgetting -------------------------------------------------------------

    async def _cancel(self, operation_id: str) -> None:
        found = (await self._read()).operations.get(operation_id)
        if found is None or found.record.done:
            return
        op = found.record
        if op.kind is OperationKind.REGISTER:
            await self._close(op.kind, op.target, Model, Phase.CANCELLED, "cancelled; nothing was registered")
            return
        await self._undo_deployment(op)

    async def _undo_deployment(self, op: Operation) -> None:
        state = await self._read()
        deployment = state.deployments.get(op.target)
        if deployment is not None and deployment.record.host == op.target:
            others = [d.record.model for d in state.deployments.values() if d.record.host == op.target]
            await self._runtime.stop(op.target)
            for name in (n for n in others if n != op.target):
                error = errors.EngineFailed(f"the deployment of its base '{op.target}' was cancelled")
                await self._end(OperationKind.DEPLOY, name, Deployment, error)
        await self._close(op.kind, op.target, Deployment, Phase.CANCELLED, "cancelled; nothing is deployed")

    async def _forget(self, key: str) -> None:
        state = await self._read()
        changes: list[Put | Delete] = []
        if (operation := state.operations.get(key)) is not None:
            changes.append(Delete(Operation, key, operation.version))
        if (idempotency := state.idempotency.get(key)) is not None:
            changes.append(Delete(IdempotencyKey, key, idempotency.version))
        await asyncio.to_thread(self._repository.commit, changes)


def _live(deployment: Deployment) -> bool:
    return deployment.phase in (Phase.PENDING, Phase.DEPLOYING)


def _gauge(gauge: Gauge, values: Iterable[str], every: type[StrEnum]) -> None:
    """Set one series per member of `every`, those that do not occur to 0."""
    counts = Counter(values)
    for value in every:
        gauge.labels(value).set(counts[value])


def _readable(message: str) -> str:
    """The last line of a traceback says what happened."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    return (lines[-1] if lines else "no reason given")[:500]


def _persist(work: Callable[[], None]) -> None:
    """Repeat `work` (read, decide, commit) while others are faster."""
    for attempt in range(store_edits.ATTEMPTS):
        try:
            work()
            return
        except errors.StaleWrite:
            if attempt == store_edits.ATTEMPTS - 1:
                raise
