"""The controller's part in deployments: place, launch, confirm, fail, stop; bring variants in and out.

Everything is in the records: killed at any point, its successor does the same again or goes on.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from controlplane import deploying, errors, feedback, launching, ledger
from controlplane.commands import Change
from controlplane.endings import End, away, back, deployed, dropped, end_open, persist, starting
from controlplane.inventory import NodeState, inventory_of
from controlplane.profile_actions import Conclude, Note
from controlplane.reconcile import EngineView, open_operation
from controlplane.records import Deployment, OperationKind, Phase
from controlplane.routing import variant_ref
from controlplane.settings import Settings
from controlplane.state.typed import Put, Repository, State
from controlplane.store_edits import Gone
from placement.types import Inventory
from workers.messages import EngineConfig, RankReport, VariantRef, WorkerReport

log = logging.getLogger(__name__)

REPORT_S = 10.0
LOOK_AGAIN_S = 0.5
SAMPLED_S = 2.5  # samples of devices that are asked for so long after a stop were taken after it
LEAVING_S = 10.0  # as long is waited for engines that were stopped to give their memory back


class Engines(Protocol):
    """What is needed of the cluster."""

    async def inventory(self) -> Inventory: ...

    async def nodes(self, wait: bool = True) -> tuple[NodeState, ...]:
        """All nodes as last heard of; `wait` a while for those that are new."""
        ...

    async def launch(self, config: EngineConfig) -> None: ...

    async def stop(self, host: str) -> None: ...

    async def reports(self, host: str) -> list[WorkerReport]: ...

    async def load_variant(self, host: str, variant: VariantRef) -> None: ...

    async def unload_variant(self, host: str, variant: VariantRef) -> None: ...


@dataclass(frozen=True)
class Hooks:
    """The controller's: notes and ends of operations, how an engine was last seen, a pause before a retry."""

    note: Note
    conclude: Conclude
    view: Callable[[str], EngineView | None]
    rest: Callable[[], Awaitable[None]]


class DeployActions:
    """One method per action of `reconcile`, which is named for the base, or the variant, that it is about."""

    def __init__(self, settings: Settings, repository: Repository, engines: Engines, hooks: Hooks) -> None:
        self._settings = settings
        self._repository = repository
        self._runtime = engines
        self._note, self._conclude = hooks.note, hooks.conclude
        self._view, self._rest = hooks.view, hooks.rest
        self._stopped_s = float("-inf")

    async def _read(self) -> State:
        return await asyncio.to_thread(self._repository.read)

    async def launch(self, host: str) -> None:
        try:
            begun, config = await self._decide(host)
        except errors.NoFeasiblePlan as e:
            state = await self._read()
            await self._fail_group(state, host, e, placed=False)
            if host in state.deployments and state.deployments[host].record.established:
                raise
            return
        why = begun.placement.reason if begun.placement else ""
        await self._tell_waiting(host, f"{why}; starting the engine", 0.3)
        if not _stands(await self._read(), begun):
            raise Gone(host)
        await self._runtime.launch(config)

    async def _decide(self, host: str) -> tuple[Deployment, EngineConfig]:
        """Place it; if nothing fits, once more on newer samples while what was stopped may be in these."""
        give_up_s = time.monotonic() + LEAVING_S
        while True:
            asked_s = time.monotonic()
            inventory = await self._runtime.inventory()
            try:
                return await asyncio.to_thread(persist, partial(self._place, host, inventory))
            except errors.NoFeasiblePlan:
                ledgers = (await self._read()).ledgers
                outdated = asked_s - self._stopped_s < SAMPLED_S or ledger.leaving(inventory, ledgers, host)
                if not outdated or asked_s > give_up_s:
                    raise
            await asyncio.sleep(LOOK_AGAIN_S)

    async def _stop(self, host: str) -> None:
        await self._runtime.stop(host)
        self._stopped_s = time.monotonic()

    def _place(self, host: str, inventory: Inventory) -> tuple[Deployment, EngineConfig]:
        """Decide on the newest state, and commit the placement together with its reservations. Blocking.

        Errors: NoFeasiblePlan; StaleWrite when something was placed or changed meanwhile: decide anew.
        """
        state, settings = self._repository.read(), self._settings
        if host not in state.models or host not in state.deployments:
            raise Gone(host)
        model, found = state.models[host].record, state.deployments[host]
        deployment = found.record
        variants = state.variants_of(host)
        free = ledger.available(inventory, state.ledgers, settings.headroom, besides=host)
        others = [d.record for d in state.deployments.values()]
        placement = deploying.decide(model, deployment, free, settings, variants, state.profiles, others)
        limit = deployment.max_active_variants
        config = launching.engine_config(model, placement, settings, variants, limit)
        excess = feedback.applied(state.profiles, model, placement, free, settings)
        begun = starting(deployment, placement, excess)
        reservations = ledger.reserve(state, host, deployment.uid, placement, time.time())
        self._repository.commit([Put(begun, found.version), *reservations])
        return begun, config

    async def release(self, holder: str) -> None:
        def once() -> None:
            self._repository.commit(ledger.without_orphans(self._repository.read(), holder))

        await asyncio.to_thread(persist, once)

    async def _tell_waiting(self, host: str, message: str, progress: float) -> None:
        """Tell the operations of a base and of the variants that wait for it."""
        for found in (await self._read()).deployments.values():
            d = found.record
            if d.host == host and d.phase in (Phase.PENDING, Phase.DEPLOYING):
                await self._note(OperationKind.DEPLOY, d.model, Phase.DEPLOYING, message, progress)

    async def confirm(self, host: str) -> None:
        """The engine answers. What its ranks take is kept, and its profile learns from it."""
        ranks = feedback.measured(await self._ranks(host))
        inventory = inventory_of(await self._runtime.nodes(wait=False))
        await self._conclude(
            OperationKind.DEPLOY,
            host,
            End(Phase.DEPLOYED, "; ".join(filter(None, ("the engine answers", feedback.told(ranks))))),
            lambda s: [
                deployed(s, host, measured=ranks),
                *back(s, host),
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

    async def fail(self, name: str) -> None:
        state = await self._read()
        if name not in state.deployments:
            raise Gone(name)
        deployment = state.deployments[name].record
        if deployment.host != name:
            await self._fail_one(name, errors.EngineFailed(f"the base of '{name}' could not be deployed"))
            return
        view = self._view(name)
        detail = _readable(view.message) if view else "no reason given"
        error = errors.EngineFailed(f"the engine of '{name}' could not start: {detail}")
        if deployment.established:
            await self._fail_group(state, name, error)
            await self._rest()  # once it is stopped it is launched again
            await self._stop(name)
            return
        await self._stop(name)
        await self._fail_group(state, name, error)

    async def _fail_group(
        self, state: State, host: str, error: errors.OstinatoError, placed: bool = True
    ) -> None:
        """End the deployments of a base and of all its variants with the same error."""
        group = [d.record.model for d in state.deployments.values() if d.record.host == host]
        for name in sorted(group, key=lambda n: n == host):
            await self._fail_one(name, error, placed)

    async def _fail_one(self, name: str, error: errors.OstinatoError, placed: bool = True) -> None:
        """End a deployment, unless it is established (then it says why it is away) or being undeployed."""

        def change(state: State) -> Sequence[Change]:
            found = state.deployments.get(name)
            if found is None or found.record.phase is Phase.DELETING:
                raise Gone(name)
            if found.record.established:
                return away(state, found, error.message, placed)
            return dropped(state, found)

        with suppress(Gone):
            await self._conclude(OperationKind.DEPLOY, name, End.failed(error), change)

    async def stop_engine(self, host: str) -> None:
        await self._note(OperationKind.UNDEPLOY, host, Phase.DELETING, "stopping the engine", 0.3)
        await self._stop(host)
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

    async def load_variant(self, name: str) -> None:
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

    async def unload_variant(self, name: str) -> None:
        host, variant = await self._variant(name)
        await self._note(OperationKind.UNDEPLOY, name, Phase.DELETING, f"unloading it from '{host}'", 0.5)
        await self._runtime.unload_variant(host, variant)
        await self._forget_deployment(name)

    async def stop_cancelled(self, name: str) -> None:
        """Stop the engine of a base whose deployment is cancelled, and fail the variants that wait for it."""
        state = await self._read()
        if name not in state.deployments or state.deployments[name].record.host != name:
            return
        await self._stop(name)
        error = errors.EngineFailed(f"the deployment of its base '{name}' was cancelled")
        for found in state.deployments.values():
            if found.record.host == name != found.record.model:
                await self._fail_one(found.record.model, error)


def _stands(state: State, begun: Deployment) -> bool:
    """Whether a launch that was begun is still wanted: neither cancelled nor undeployed, nor placed anew."""
    found = state.deployments.get(begun.model)
    if found is None or found.record.phase is Phase.DELETING:
        return False
    operation = open_operation(state, OperationKind.DEPLOY, begun.model)
    cancelled = operation is not None and operation.cancel_requested
    return not cancelled and (found.record.uid, found.record.placement) == (begun.uid, begun.placement)


def _readable(message: str) -> str:
    """The last line of a traceback says what happened."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    return (lines[-1] if lines else "no reason given")[:500]
