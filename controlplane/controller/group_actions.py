"""The controller's part in worker groups that have a place: confirm, give up, scale, drain, stop.

Everything is in the records: after it was killed at any point, its successor repeats or continues the action.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from contextlib import suppress

from controlplane import errors
from controlplane.cluster import reservations
from controlplane.cluster.inventory import inventory_of
from controlplane.controller.interfaces import EngineControl, Hooks
from controlplane.controller.launch_action import Fail, LaunchAction
from controlplane.controller.transitions import (
    NoSuccessor,
    clear_reasons,
    find_group,
    is_still,
    mark_serving,
    require_draining,
    unplace,
)
from controlplane.planning import autoscaling, rebalancing, rescheduling
from controlplane.profiling import memory_feedback
from controlplane.settings import Settings
from controlplane.state import transactions
from controlplane.state.operations import End
from controlplane.state.records import Deployment, OperationKind, Phase
from controlplane.state.repository import Change, Repository, State
from controlplane.state.transactions import Superseded, persist
from controlplane.state.worker_groups import MeasuredRank, WorkerGroup, base_of, is_spare, number_of
from workers.messages import WorkerReport

log = logging.getLogger(__name__)

REPORT_S = 10.0
# After this time, gateways that look for workers every two seconds no longer send to a worker that left.
QUIET_S = 6.0
LOOK_S = 0.5


class GroupActions:
    """One method per action of `reconcile` on a worker group, by its id."""

    def __init__(
        self, settings: Settings, repository: Repository, cluster: EngineControl, hooks: Hooks, fail: Fail
    ) -> None:
        """`fail` ends a deployment that never served, and everything that waits for it, with an error."""
        self._settings = settings
        self._repository = repository
        self._cluster = cluster
        self._hooks = hooks
        self._launching = LaunchAction(settings, repository, cluster, hooks, fail)
        self.launch = self._launching.launch

    # --- serving -------------------------------------------------------------------------------

    async def confirm(self, group_id: str) -> None:
        """The engine answers. The memory of its ranks is recorded, and its profile learns from it."""
        begun, before = find_group(await self._repository.read_async(), group_id)
        ranks, base = await self._ranks(group_id), base_of(group_id)
        inventory = inventory_of(await self._cluster.nodes(wait=False))

        def change(state: State) -> Sequence[Change]:
            if not is_still(state, group_id, begun.record.uid, before.placement):
                raise Superseded(group_id)  # placed again while its ranks were asked
            served, group = mark_serving(state, group_id, ranks, time.time())
            return [
                served,
                *clear_reasons(state, base),
                *memory_feedback.memory_correction(state, base, group, inventory, self._settings),
            ]

        message = "; ".join(filter(None, ("the engine answers", memory_feedback.describe(ranks))))
        await self._hooks.conclude(OperationKind.DEPLOY, base, End(Phase.DEPLOYED, message), change)

    async def _ranks(self, group_id: str) -> tuple[MeasuredRank, ...]:
        """The memory of the ranks, as their engine reports; empty without a report, which is not required."""
        try:
            async with asyncio.timeout(REPORT_S):
                reports = await self._cluster.reports(group_id)
        except (TimeoutError, errors.OstinatoError) as e:
            log.warning("the engine of %s does not report its memory: %r", group_id, e)
            return ()
        return memory_feedback.measured(reports[0].ranks if reports else ())

    async def replan(self, group_id: str) -> None:
        """Give up the group's place, and stop its engine there; then it is launched elsewhere."""
        nodes, view = await self._cluster.nodes(wait=False), self._hooks.view(group_id)

        def change(deployment: Deployment, state: State, group: WorkerGroup) -> WorkerGroup | NoSuccessor:
            reason = rescheduling.replacement_reason(group, view, nodes)
            if not reason:
                raise Superseded(f"the reason to replace {group_id}")
            log.warning("%s leaves its devices: %s", group_id, reason)
            if is_spare(group, deployment.groups):
                return NoSuccessor(reason)
            return rescheduling.unplaced(group, reason, time.time())

        await unplace(self._repository, group_id, change)
        await self.stop(group_id)

    async def scale(self, base: str) -> None:
        """Add or remove groups according to the load."""

        def change(deployment: Deployment) -> Deployment:
            if deployment.phase is Phase.DELETING:
                raise Superseded(base)
            count = self._hooks.wanted(deployment)
            log.info("%s gets %d worker groups in place of %d", base, count, autoscaling.active(deployment))
            return autoscaling.resized(deployment, count)

        await asyncio.to_thread(transactions.edit, self._repository, Deployment, base, change)

    async def retire(self, group_id: str) -> None:
        """The group serves: drain the group that it replaces."""

        def change(deployment: Deployment) -> Deployment:
            if deployment.phase is Phase.DELETING:
                raise Superseded(group_id)
            return rebalancing.retired(deployment, number_of(group_id))

        await asyncio.to_thread(transactions.edit, self._repository, Deployment, base_of(group_id), change)

    # --- going ---------------------------------------------------------------------------------

    async def stop(self, group_id: str) -> None:
        """Stop an engine; its memory is not free at once."""
        await self._cluster.stop(group_id)
        self._launching.stopped_s = time.monotonic()

    async def drain(self, group_id: str) -> None:
        """Stop the engine when it had no request for a while, or when no request may last any longer.

        Raises Superseded when its deployment is undeployed meanwhile: another deployment's engine may have
        its name.
        """
        uid = find_group(await self._repository.read_async(), group_id).deployment.record.uid
        await self._until_quiet(group_id, uid)
        require_draining(await self._repository.read_async(), group_id, uid)
        await self.stop(group_id)

        def change(deployment: Deployment, state: State, group: WorkerGroup) -> WorkerGroup | None:
            require_draining(state, group_id, uid)
            return None

        await unplace(self._repository, group_id, change)

    async def _until_quiet(self, group_id: str, uid: int) -> None:
        """Wait until the engine has no requests; an engine that does not answer for QUIET_S has none."""
        began_s = busy_s = time.monotonic()
        while time.monotonic() - began_s < self._settings.request_timeout_s + QUIET_S:
            require_draining(await self._repository.read_async(), group_id, uid)
            reports: list[WorkerReport] = []
            with suppress(errors.OstinatoError):
                reports = await self._cluster.reports(group_id)
            if any(report.ongoing_requests for report in reports):
                busy_s = time.monotonic()
            elif time.monotonic() - busy_s >= QUIET_S:
                return
            await asyncio.sleep(LOOK_S)

    async def release(self, holder: str) -> None:
        def once() -> None:
            self._repository.commit(reservations.without_orphans(self._repository.read(), holder))

        await asyncio.to_thread(persist, once)
