"""The controller's part in worker groups: place, launch, confirm, place anew, drain, stop.

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

from controlplane import (
    deploying,
    errors,
    feedback,
    launching,
    ledger,
    rebalancing,
    replanning,
    scaling,
    store_edits,
)
from controlplane.endings import End, back, persist, serving, starting, the_group
from controlplane.engine_views import EngineView
from controlplane.inventory import NodeState, inventory_of, ray_ids
from controlplane.profile_actions import Conclude, Note
from controlplane.reconcile import open_operation
from controlplane.records import Deployment, OperationKind, Phase
from controlplane.settings import Settings
from controlplane.state.typed import Change, Put, Repository, State
from controlplane.store_edits import Gone
from controlplane.worker_groups import (
    GroupPhase,
    MeasuredRank,
    WorkerGroup,
    group_id,
    host_of,
    is_spare,
    number_of,
)
from placement.rebalancing import without
from placement.types import Inventory, Placement
from workers.messages import EngineConfig, VariantRef, WorkerReport

log = logging.getLogger(__name__)

REPORT_S = 10.0
# Gateways that look for workers every two seconds have all stopped asking one that left their tables.
QUIET_S = 6.0
LOOK_S = 0.5
LOOK_AGAIN_S = 0.5
SAMPLED_S = 2.5  # samples of devices that are asked for so long after a stop were taken after it
MOST_LAUNCHES = 5  # in a row that the cluster refuses
LEAVING_S = 10.0  # as long is waited for engines that were stopped to give their memory back


class Engines(Protocol):
    """What is needed of the cluster. Engines are named for their worker groups."""

    async def inventory(self) -> Inventory: ...

    async def nodes(self, wait: bool = True) -> tuple[NodeState, ...]:
        """All nodes as last heard of; `wait` a while for those that are new."""
        ...

    async def launch(self, config: EngineConfig) -> None: ...

    async def stop(self, group: str) -> None: ...

    async def reports(self, group: str) -> list[WorkerReport]: ...

    async def load_variant(self, group: str, variant: VariantRef) -> None: ...

    async def unload_variant(self, group: str, variant: VariantRef) -> None: ...


@dataclass(frozen=True)
class Hooks:
    """The controller's: notes and ends of operations, how an engine was last seen, and how many groups a
    deployment should have by its load."""

    note: Note
    conclude: Conclude
    view: Callable[[str], EngineView | None]
    wanted: Callable[[Deployment], int]


Unplace = Callable[[Deployment, State, WorkerGroup], WorkerGroup | None]
Fail = Callable[[str, errors.OstinatoError], Awaitable[None]]


class GroupActions:
    """One method per action of `reconcile` on a worker group, by its name."""

    def __init__(
        self, settings: Settings, repository: Repository, engines: Engines, hooks: Hooks, fail: Fail
    ) -> None:
        """`fail` ends a deployment that never served, and all that waits for it, with an error."""
        self._settings = settings
        self._repository = repository
        self._runtime = engines
        self._hooks = hooks
        self._fail = fail
        self.stopped_s = float("-inf")  # when an engine was last stopped

    async def _read(self) -> State:
        return await asyncio.to_thread(self._repository.read)

    async def _unplace(self, name: str, change: Unplace) -> None:
        """Commit what becomes of a group that gives up its place; None: it is no more. Raises Gone.

        `change` gets its deployment, the state and the group.
        """

        def once() -> None:
            state = self._repository.read()
            found, group = the_group(state, name)
            left = change(found.record, state, group)
            changed = (
                replanning.without_group(found.record, group.number)
                if left is None
                else replanning.with_group(found.record, left)
            )
            self._repository.commit([Put(changed, found.version), *ledger.release(state, name)])

        await asyncio.to_thread(persist, once)

    # --- placing -------------------------------------------------------------------------------

    async def launch(self, group: str) -> None:
        try:
            placement, uid, config = await self._decide(group)
        except errors.NoFeasiblePlan as e:
            await self._refused(group, e)
            return
        await self._tell_waiting(host_of(group), f"{placement.reason}; starting the engine", 0.3)
        state = await self._read()
        if not is_still(state, group, uid, placement) or _is_cancelled(state, group):
            raise Gone(group)
        try:
            await self._runtime.launch(config)
        except Exception as e:
            log.warning("%s could not be launched: %r", group, e)
            await self._not_launched(group, f"it could not be launched: {e}")

    async def _not_launched(self, group: str, reason: str) -> None:
        """It gives up its place, to be placed anew; a few times, if it never served."""
        found, unit = the_group(await self._read(), group)
        if not found.record.established and unit.failures + 1 >= MOST_LAUNCHES:
            await self._fail(host_of(group), errors.EngineFailed(f"the engine of '{group}': {reason}"))
            return

        def change(deployment: Deployment, state: State, unit: WorkerGroup) -> WorkerGroup | None:
            if is_spare(unit, deployment.groups):
                return None
            return replanning.unplaced(unit, reason, time.time())

        await self._unplace(group, change)

    async def _decide(self, group: str) -> tuple[Placement, int, EngineConfig]:
        """Place it; if nothing fits, once more on newer samples while what was stopped may be in these."""
        give_up_s = time.monotonic() + LEAVING_S
        while True:
            asked_s = time.monotonic()
            inventory = await self._runtime.inventory()
            nodes = await self._runtime.nodes(wait=False)
            try:
                return await asyncio.to_thread(persist, partial(self._place, group, inventory, nodes))
            except errors.NoFeasiblePlan:
                ledgers = (await self._read()).ledgers
                outdated = asked_s - self.stopped_s < SAMPLED_S or ledger.leaving(inventory, ledgers, group)
                if not outdated or asked_s > give_up_s:
                    raise
            await asyncio.sleep(LOOK_AGAIN_S)

    def _place(
        self, name: str, inventory: Inventory, nodes: Sequence[NodeState]
    ) -> tuple[Placement, int, EngineConfig]:
        """Decide on the newest state, and commit the placement together with its reservations. Blocking.

        Errors: NoFeasiblePlan; StaleWrite when something was placed or changed meanwhile: decide anew.
        """
        state, settings, host = self._repository.read(), self._settings, host_of(name)
        found, group = the_group(state, name)
        if host not in state.models:
            raise Gone(host)
        model, deployment = state.models[host].record, found.record
        variants = state.variants_of(host)
        free = ledger.available(inventory, state.ledgers, settings.headroom, besides=name)
        free = deploying.suited(without(free, group.avoid), group.device_kind)
        others = deploying.besides((d.record for d in state.deployments.values()), name)
        if group.replaces is not None:
            others = deploying.besides(others, group_id(host, group.replaces))
        asked = deployment if group.replaces is None else rebalancing.unrelaxed(deployment)
        placement = deploying.decide(model, asked, free, settings, variants, state.profiles, others)
        limit = deployment.max_active_variants
        config = launching.engine_config(model, placement, settings, variants, limit, group=name)
        excess = feedback.applied(state.profiles, model, placement, free, settings)
        now_s, ids = time.time(), ray_ids(nodes)
        begun = Put(starting(deployment, group, placement, excess, now_s, ids), found.version)
        reservations = ledger.reserve(state, name, deployment.uid, placement, now_s)
        self._repository.commit([begun, *reservations])
        return placement, deployment.uid, config

    async def _refused(self, group: str, error: errors.NoFeasiblePlan) -> None:
        """There is no room: the end of a deployment that never served; another one waits for room."""
        state, nodes = await self._read(), await self._runtime.nodes(wait=False)
        found, _ = the_group(state, group)
        if not found.record.established:
            await self._fail(host_of(group), error)
            return

        def change(deployment: Deployment, state: State, unit: WorkerGroup) -> WorkerGroup | None:
            if is_spare(unit, deployment.groups):
                return None  # what it was to replace goes on where it is
            cluster = replanning.cluster_key(nodes, state.ledgers, besides=group)
            return replanning.refused(unit, error.message, cluster, time.time())

        await self._unplace(group, change)
        log.warning("%s finds no place: %s", group, error.message)
        if not set(found.record.serving_ids()) - {group}:
            await self._fail(host_of(group), error)  # the variants that wait for it

    async def _tell_waiting(self, host: str, message: str, progress: float) -> None:
        """Tell the operations of a base and of the variants that wait for it."""
        for found in (await self._read()).deployments.values():
            d = found.record
            if d.host == host and d.phase in (Phase.PENDING, Phase.DEPLOYING):
                await self._hooks.note(OperationKind.DEPLOY, d.model, Phase.DEPLOYING, message, progress)

    # --- serving -------------------------------------------------------------------------------

    async def confirm(self, group: str) -> None:
        """The engine answers. What its ranks take is kept, and its profile learns from it."""
        begun, before = the_group(await self._read(), group)
        ranks, host = await self._ranks(group), host_of(group)
        inventory = inventory_of(await self._runtime.nodes(wait=False))

        def change(state: State) -> Sequence[Change]:
            if not is_still(state, group, begun.record.uid, before.placement):
                raise Gone(group)  # placed anew while its ranks were asked
            served, unit = serving(state, group, ranks, time.time())
            return [
                served,
                *back(state, host),
                *feedback.lesson(state, host, unit, inventory, self._settings),
            ]

        told = "; ".join(filter(None, ("the engine answers", feedback.told(ranks))))
        await self._hooks.conclude(OperationKind.DEPLOY, host, End(Phase.DEPLOYED, told), change)

    async def _ranks(self, group: str) -> tuple[MeasuredRank, ...]:
        """What they take, as their engine reports; nothing if it does not, for it answers all the same."""
        try:
            async with asyncio.timeout(REPORT_S):
                reports = await self._runtime.reports(group)
        except (TimeoutError, errors.OstinatoError) as e:
            log.warning("the engine of %s does not say what it takes: %r", group, e)
            return ()
        return feedback.measured(reports[0].ranks if reports else ())

    async def replan(self, group: str) -> None:
        """Give up the group's place, and stop what is left there; then it is launched elsewhere."""
        nodes, view = await self._runtime.nodes(wait=False), self._hooks.view(group)

        def change(deployment: Deployment, state: State, unit: WorkerGroup) -> WorkerGroup | None:
            reason = replanning.trouble(unit, view, nodes)
            if not reason:
                raise Gone(f"the trouble of {group}")
            log.warning("%s gives up its place: %s", group, reason)
            if is_spare(unit, deployment.groups):
                return None
            return replanning.unplaced(unit, reason, time.time())

        await self._unplace(group, change)
        await self.stop(group)

    async def scale(self, host: str) -> None:
        """More groups, or fewer, as the load asks."""

        def change(deployment: Deployment) -> Deployment:
            if deployment.phase is Phase.DELETING:
                raise Gone(host)
            count = self._hooks.wanted(deployment)
            log.info("%s gets %d groups instead of %d", host, count, scaling.active(deployment))
            return scaling.resized(deployment, count)

        await asyncio.to_thread(store_edits.edit, self._repository, Deployment, host, change)

    async def retire(self, group: str) -> None:
        """The group serves: what it replaces is drained."""

        def change(deployment: Deployment) -> Deployment:
            if deployment.phase is Phase.DELETING:
                raise Gone(group)
            return rebalancing.retired(deployment, number_of(group))

        await asyncio.to_thread(store_edits.edit, self._repository, Deployment, host_of(group), change)

    # --- going ---------------------------------------------------------------------------------

    async def stop(self, group: str) -> None:
        """Stop an engine; what it held is not free at once."""
        await self._runtime.stop(group)
        self.stopped_s = time.monotonic()

    async def drain(self, group: str) -> None:
        """Stop the engine when it had no request for a while, or when a request may last no longer.

        Raises Gone when its deployment is undeployed meanwhile: another one's engine may have its name.
        """
        uid = the_group(await self._read(), group)[0].record.uid
        await self._until_quiet(group, uid)
        _require_draining(await self._read(), group, uid)
        await self.stop(group)

        def change(deployment: Deployment, state: State, unit: WorkerGroup) -> WorkerGroup | None:
            _require_draining(state, group, uid)
            return None

        await self._unplace(group, change)

    async def _until_quiet(self, group: str, uid: int) -> None:
        """An engine that does not answer for so long has no requests that could end."""
        began_s = asked_s = time.monotonic()
        while time.monotonic() - began_s < self._settings.request_timeout_s + QUIET_S:
            _require_draining(await self._read(), group, uid)
            reports: list[WorkerReport] = []
            with suppress(errors.OstinatoError):
                reports = await self._runtime.reports(group)
            if any(report.ongoing_requests for report in reports):
                asked_s = time.monotonic()
            elif time.monotonic() - asked_s >= QUIET_S:
                return
            await asyncio.sleep(LOOK_S)

    async def release(self, holder: str) -> None:
        def once() -> None:
            self._repository.commit(ledger.without_orphans(self._repository.read(), holder))

        await asyncio.to_thread(persist, once)


def is_still(state: State, name: str, uid: int, placement: Placement | None) -> bool:
    """Whether a group is the one that was meant: of the same deployment, and not placed anew meanwhile."""
    try:
        found, group = the_group(state, name)
    except Gone:
        return False
    return (found.record.uid, group.placement) == (uid, placement)


def _is_cancelled(state: State, name: str) -> bool:
    operation = open_operation(state, OperationKind.DEPLOY, host_of(name))
    return operation is not None and operation.cancel_requested


def _require_draining(state: State, name: str, uid: int) -> None:
    found, group = the_group(state, name)
    if found.record.uid != uid or group.phase is not GroupPhase.DRAINING:
        raise Gone(name)
