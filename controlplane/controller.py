"""The controller: carries out what `reconcile` says, and writes down what became of it.

It keeps nothing it could lose: killed at any point, its successor reads the records, observes the
engines and goes on. Only one action per key runs at once; a failed one is tried again after a pause.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from controlplane import deploying, errors, feedback, fetching, launching, ledger
from controlplane.commands import Change, advance
from controlplane.endings import End, deployed, dropped, end_open, persist, same, starting, undone
from controlplane.holdings import holdings
from controlplane.inventory import NodeState, inventory_of
from controlplane.metrics import ControllerMetrics, set_counts
from controlplane.profile_actions import Measurer, ProfileActions
from controlplane.reconcile import (
    Action,
    Admit,
    BeginProfile,
    Cancel,
    ConfirmDeployed,
    EndProfile,
    EngineStatus,
    EngineView,
    FailDeployment,
    Forget,
    Launch,
    LoadVariant,
    Measure,
    Observed,
    Profile,
    Release,
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
from placement.types import Inventory, Placement
from workers.messages import EngineConfig, RankReport, VariantRef, WorkerReport

log = logging.getLogger(__name__)

TICK_S = 0.1
OBSERVE_EVERY_S = 1.0
RETRY_S = 3.0
REPORT_S = 10.0


class Runtime(Measurer, Protocol):
    """What the controller needs of the cluster."""

    async def launch(self, config: EngineConfig) -> None: ...

    async def stop(self, host: str) -> None: ...

    async def observe(self) -> dict[str, EngineView]: ...

    async def nodes(self, wait: bool = True) -> tuple[NodeState, ...]:
        """All nodes as last heard of; `wait` a while for those that are new."""
        ...

    async def reports(self, host: str) -> list[WorkerReport]: ...

    async def load_variant(self, host: str, variant: VariantRef) -> None: ...

    async def unload_variant(self, host: str, variant: VariantRef) -> None: ...

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
        self._profiles = ProfileActions(settings, repository, runtime, self._note, self._conclude)
        self._do: dict[type[Action], Callable[[str], Awaitable[None]]] = {
            Profile: self._profile,
            Admit: self._profiles.admit,
            Measure: self._profiles.measure,
            BeginProfile: self._profiles.begin,
            EndProfile: self._profiles.end,
            Launch: self._launch,
            ConfirmDeployed: self._confirm,
            FailDeployment: self._fail_deployment,
            LoadVariant: self._load_variant,
            UnloadVariant: self._unload_variant,
            StopEngine: self._stop_engine,
            Release: self._release,
            Cancel: self._cancel,
            Forget: self._forget,
        }

    async def run(self) -> None:
        """Reconcile on every change of the records, and every second for what changed outside."""
        try:
            await self._reconcile_forever()
        finally:
            for task in self._tasks.values():
                task.cancel()

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
                log.warning("the state store is away: %s", e)
            except Exception:
                log.exception("reconciling failed; trying again")
                await asyncio.sleep(OBSERVE_EVERY_S)
            await asyncio.sleep(TICK_S)

    async def step(self) -> None:
        """Look once, and start what is to be done."""
        busy = frozenset(self._tasks)  # before looking: what ends meanwhile may not be seen yet
        self._engines = dict(await self._runtime.observe())
        nodes = await self._runtime.nodes(wait=False)
        state = await asyncio.to_thread(self._repository.read)
        self._report(state, nodes)
        observed = Observed(self._engines, busy, time.time())
        for action in reconcile(state, observed):
            self._tasks[action.key] = asyncio.create_task(self._carry_out(action))

    async def settle(self) -> None:
        """Wait for all actions that run now."""
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    def _report(self, state: State, nodes: Sequence[NodeState]) -> None:
        self._metrics.devices.show(holdings(nodes, state.ledgers, self._settings.headroom))
        set_counts(self._metrics.deployments, (d.record.phase for d in state.deployments.values()), Phase)
        set_counts(self._metrics.models, (m.record.phase for m in state.models.values()), Phase)
        set_counts(self._metrics.engines, (e.status for e in self._engines.values()), EngineStatus)

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

    async def _conclude(
        self, kind: OperationKind, target: str, end: End, change: Callable[[State], Sequence[Change]]
    ) -> None:
        """Change records and end the open operations about `target`, in one commit.

        Raises Gone when `change` does, and for a success of what is to be cancelled.
        """

        def once() -> None:
            state = self._repository.read()
            changes = list(change(state))
            self._repository.commit([*changes, *end_open(state, kind, target, end)])

        await asyncio.to_thread(persist, once)

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
        except Exception as e:  # reading the same files again would fail alike
            if not isinstance(e, errors.OstinatoError):
                log.exception("profiling '%s' failed", name)
                e = errors.OstinatoError(f"an unexpected error while its files were read: {e!r}")
            await self._conclude(
                OperationKind.REGISTER,
                name,
                End.failed(e),
                lambda s: [Delete(Model, name, same(s.models, name, model.uid).version)],
            )
            return
        await self._profiles.admit_or_measure(ready)

    # --- deployment ----------------------------------------------------------------------------

    async def _launch(self, host: str) -> None:
        inventory = await self._runtime.inventory()
        try:
            placement, config = await asyncio.to_thread(persist, lambda: self._place(host, inventory))
        except errors.NoFeasiblePlan as e:
            state = await self._read()
            await self._fail_group(state, host, e)
            if host in state.deployments and state.deployments[host].record.established:
                raise
            return
        await self._tell_waiting(host, f"{placement.reason}; starting the engine", 0.3)
        await self._runtime.launch(config)

    def _place(self, host: str, inventory: Inventory) -> tuple[Placement, EngineConfig]:
        """Decide on the newest state, and commit the placement together with its reservations. Blocking.

        Errors: NoFeasiblePlan; StaleWrite when something was placed or changed meanwhile: decide anew.
        """
        state, settings = self._repository.read(), self._settings
        if host not in state.models or host not in state.deployments:
            raise Gone(host)
        model, found = state.models[host].record, state.deployments[host]
        deployment = found.record
        variants = [m.record for m in state.models.values() if m.record.base == host]
        free = ledger.available(inventory, state.ledgers, settings.headroom, besides=host)
        others = [d.record for d in state.deployments.values()]
        placement = deploying.decide(model, deployment, free, settings, variants, state.profiles, others)
        limit = deployment.max_active_variants
        config = launching.engine_config(model, placement, settings, variants, limit)
        excess = feedback.applied(state.profiles, model, placement, free, settings)
        begun = Put(starting(deployment, placement, excess), found.version)
        reservations = ledger.reserve(state, host, deployment.uid, placement, time.time())
        self._repository.commit([begun, *reservations])
        return placement, config

    async def _release(self, holder: str) -> None:
        def once() -> None:
            self._repository.commit(ledger.without_orphans(self._repository.read(), holder))

        await asyncio.to_thread(persist, once)

    async def _tell_waiting(self, host: str, message: str, progress: float) -> None:
        """Tell the operations of a base and of the variants that wait for it."""
        for found in (await self._read()).deployments.values():
            d = found.record
            if d.host == host and d.phase in (Phase.PENDING, Phase.DEPLOYING):
                await self._note(OperationKind.DEPLOY, d.model, Phase.DEPLOYING, message, progress)

    async def _confirm(self, host: str) -> None:
        """The engine answers. What its ranks take is kept, and its profile learns from it."""
        ranks = feedback.measured(await self._ranks(host))
        inventory = inventory_of(await self._runtime.nodes(wait=False))
        await self._conclude(
            OperationKind.DEPLOY,
            host,
            End(Phase.DEPLOYED, "; ".join(filter(None, ("the engine answers", feedback.told(ranks))))),
            lambda s: [
                deployed(s, host, measured=ranks),
                *feedback.lesson(s, host, ranks, inventory, self._settings),
            ],
        )

    async def _ranks(self, host: str) -> tuple[RankReport, ...]:
        """What they take, as their engine reports; nothing if it does not, for it answers all the same."""
        try:
            async with asyncio.timeout(REPORT_S):
                reports = await self._runtime.reports(host)
        except (TimeoutError, errors.OstinatoError) as e:
            log.warning("the engine of %s does not say what it takes: %r", host, e)
            return ()
        return reports[0].ranks if reports else ()

    async def _fail_deployment(self, name: str) -> None:
        state = await self._read()
        if name not in state.deployments:
            raise Gone(name)
        deployment = state.deployments[name].record
        if deployment.host != name:
            await self._fail_one(name, errors.EngineFailed(f"the base of '{name}' could not be deployed"))
            return
        view = self._engines.get(name)
        detail = _readable(view.message) if view else "no reason given"
        error = errors.EngineFailed(f"the engine of '{name}' could not start: {detail}")
        if deployment.established:
            await self._fail_group(state, name, error)
            await asyncio.sleep(RETRY_S)  # once it is stopped it is launched again
            await self._runtime.stop(name)
            return
        await self._runtime.stop(name)
        await self._fail_group(state, name, error)

    async def _fail_group(self, state: State, host: str, error: errors.OstinatoError) -> None:
        """End the deployments of a base and of all its variants with the same error."""
        group = [d.record.model for d in state.deployments.values() if d.record.host == host]
        for name in sorted(group, key=lambda n: n == host):
            await self._fail_one(name, error)

    async def _fail_one(self, name: str, error: errors.OstinatoError) -> None:
        """End a deployment, unless it is established (then it says why it is away) or being undeployed."""

        def change(state: State) -> Sequence[Change]:
            found = state.deployments.get(name)
            if found is None or found.record.phase is Phase.DELETING:
                raise Gone(name)
            if found.record.established:
                return [Put(replace(found.record, reason=error.message), found.version)]
            return dropped(state, found)

        with suppress(Gone):
            await self._conclude(OperationKind.DEPLOY, name, End.failed(error), change)

    async def _stop_engine(self, host: str) -> None:
        await self._note(OperationKind.UNDEPLOY, host, Phase.DELETING, "stopping the engine", 0.3)
        await self._runtime.stop(host)
        await self._forget_deployment(host)

    async def _forget_deployment(self, name: str) -> None:
        """Delete a deployment that was to be deleted; end what was going on with it."""
        overtaken = End(Phase.CANCELLED, "undeployed while it was being deployed")

        def change(state: State) -> Sequence[Change]:
            found = state.deployments.get(name)
            if found is None or found.record.phase is not Phase.DELETING:
                raise Gone(name)
            endings = end_open(state, OperationKind.DEPLOY, name, overtaken)
            return [*dropped(state, found), *endings]

        await self._conclude(OperationKind.UNDEPLOY, name, End(Phase.DELETED, "undeployed"), change)

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
            await self._fail_one(name, e)
            return
        message = f"served by the engine of '{host}', in one batch with it"
        await self._conclude(
            OperationKind.DEPLOY,
            name,
            End(Phase.DEPLOYED, message),
            lambda s: [deployed(s, name, variant.uid)],
        )

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
        message = "cancelled; nothing was registered"
        if op.kind is OperationKind.PROFILE:
            message = "cancelled; what was measured is kept"
        if op.kind is OperationKind.DEPLOY:
            message = "cancelled; nothing is deployed"
            await self._stop_cancelled(op.target)
        await self._conclude(op.kind, op.target, End(Phase.CANCELLED, message), lambda s: undone(s, op.id))

    async def _stop_cancelled(self, name: str) -> None:
        """Stop the engine of a base whose deployment is cancelled, and fail the variants that wait for it."""
        state = await self._read()
        if name not in state.deployments or state.deployments[name].record.host != name:
            return
        await self._runtime.stop(name)
        error = errors.EngineFailed(f"the deployment of its base '{name}' was cancelled")
        for found in state.deployments.values():
            if found.record.host == name != found.record.model:
                await self._fail_one(found.record.model, error)

    async def _forget(self, key: str) -> None:
        state = await self._read()
        changes: list[Change] = []
        if (operation := state.operations.get(key)) is not None:
            changes.append(Delete(Operation, key, operation.version))
        if (idempotency := state.idempotency.get(key)) is not None:
            changes.append(Delete(IdempotencyKey, key, idempotency.version))
        await asyncio.to_thread(self._repository.commit, changes)


def _readable(message: str) -> str:
    """The last line of a traceback says what happened."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    return (lines[-1] if lines else "no reason given")[:500]
