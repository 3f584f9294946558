"""How a worker group gets a place and is launched there, or waits for a place.

The placement is in the records before its engine is launched. If the controller is killed in between, its
successor decides again, without counting the group's own reservation. It usually finds the same place.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial

from controlplane import errors
from controlplane.cluster import reservations
from controlplane.cluster.inventory import NodeState, ray_ids
from controlplane.controller.interfaces import EngineControl, Hooks
from controlplane.controller.profile_actions import RECLAIM_WAIT_S
from controlplane.controller.transitions import (
    NoSuccessor,
    find_group,
    is_still,
    mark_starting,
    unplace,
)
from controlplane.planning import (
    engine_config,
    fetching,
    placement_decision,
    rebalancing,
    reclaimable_memory,
    rescheduling,
)
from controlplane.planning.reclaimable_memory import FreeMemory, Place
from controlplane.profiling import memory_feedback, progress, queue
from controlplane.profiling.calibrations import measurements_of
from controlplane.settings import Settings
from controlplane.state import deployments
from controlplane.state.operations import open_operation
from controlplane.state.records import Deployment, OperationKind, Phase
from controlplane.state.repository import Change, Put, Repository, State
from controlplane.state.transactions import Superseded, persist
from controlplane.state.worker_groups import GroupPhase, WorkerGroup, base_of, group_id_of, is_spare
from placement.rebalancing import without
from placement.types import Constraint, Inventory, Placement
from workers.fetching.messages import Progress
from workers.messages import EngineConfig

log = logging.getLogger(__name__)

LOOK_AGAIN_S = 0.5
AWAITED_S = 2.0  # between two looks at nodes that are expected to have devices soon
SAMPLED_S = 2.5  # device samples that are requested this long after a stop were taken after it
MAX_LAUNCHES = 5  # failed launches in a row

Fail = Callable[[str, errors.OstinatoError], Awaitable[None]]


@dataclass(frozen=True)
class _Committed:
    """What was committed. `preempting` are the holders whose memory it takes over."""

    placement: Placement
    uid: int
    config: EngineConfig
    preempting: tuple[str, ...]


@dataclass(frozen=True)
class _Sample:
    """The devices, requested at these times (`time.monotonic`, time of day). The `last` sample must
    suffice."""

    inventory: Inventory
    requested_s: float
    requested_at_s: float
    last: bool


@dataclass(frozen=True)
class _Queued:
    """There will be room, or may be, after what `reason` names has ended."""

    reason: str


class LaunchAction:
    """The action Launch. `stopped_s` is when an engine was last stopped (`time.monotonic`)."""

    def __init__(
        self, settings: Settings, repository: Repository, cluster: EngineControl, hooks: Hooks, fail: Fail
    ) -> None:
        """`fail` ends a deployment that never served, and everything that waits for it, with an error."""
        self._settings = settings
        self._repository = repository
        self._cluster = cluster
        self._note, self._fetched = hooks.note, hooks.fetched
        self._fail = fail
        self.stopped_s = float("-inf")

    async def launch(self, group_id: str) -> None:
        try:
            decision = await self._decide(group_id)
        except errors.NoFeasiblePlan as e:
            await self._refused(group_id, e)
            return
        if isinstance(decision, _Queued):
            await self._notify_waiting(base_of(group_id), decision.reason, 0.1)
            return
        placement, uid = decision.placement, decision.uid
        await self._notify_waiting(base_of(group_id), f"{placement.reason}; starting the engine", 0.3)
        if not await self._have_files(group_id, placement):
            return
        await self._await_reclaim(decision.preempting)
        state = await self._repository.read_async()
        if not is_still(state, group_id, uid, placement) or _is_cancelled(state, group_id):
            raise Superseded(group_id)
        try:
            await self._cluster.launch(decision.config)
        except Exception as e:
            log.warning("%s could not be launched: %r", group_id, e)
            await self._not_launched(group_id, f"the engine could not be launched: {e}")

    async def _have_files(self, group_id: str, placement: Placement) -> bool:
        """Fetch the base's files onto the nodes that lack them. False: that failed; the place is given up."""
        base = base_of(group_id)

        async def tell(progress: Progress) -> None:
            await self._notify_waiting(base, fetching.described(progress), 0.3)

        try:
            await self._fetched([base], {rank.node for rank in placement.ranks}, tell)
        except errors.Unavailable as e:
            await self._not_launched(group_id, e.message)
            return False
        except errors.OstinatoError as e:
            await self._not_fetched(group_id, e)
            return False
        return True

    async def _not_fetched(self, group_id: str, error: errors.OstinatoError) -> None:
        """A deployment that never served ends with the error; another one is launched again later."""
        versioned, _ = find_group(await self._repository.read_async(), group_id)
        if versioned.record.established:
            await self._not_launched(group_id, error.message)
        else:
            await self._fail(base_of(group_id), error)

    async def _samples(self) -> AsyncIterator[_Sample]:
        """Samples of the devices, which are taken until the caller has decided.

        A sample may still show memory of stopped engines. The caller must decide on the last sample.
        """
        give_up_s = time.monotonic() + RECLAIM_WAIT_S
        while True:
            requested_s, requested_at_s = time.monotonic(), time.time()
            last = requested_s > give_up_s
            yield _Sample(await self._cluster.inventory(), requested_s, requested_at_s, last)
            if last:
                return
            await asyncio.sleep(LOOK_AGAIN_S)

    async def _await_reclaim(self, holders: Collection[str]) -> None:
        """Wait, up to RECLAIM_WAIT_S, until no device shows memory of these holders."""
        if not holders:
            return
        async for sample in self._samples():
            ledgers = (await self._repository.read_async()).ledgers
            if not reservations.stale_holders(sample.inventory, ledgers) & set(holders):
                return

    async def _not_launched(self, group_id: str, reason: str) -> None:
        """Give up the place, to be placed again; fail a deployment that never served after MAX_LAUNCHES."""
        versioned, group = find_group(await self._repository.read_async(), group_id)
        if not versioned.record.established and group.failures + 1 >= MAX_LAUNCHES:
            await self._fail(base_of(group_id), errors.EngineFailed(f"the engine of '{group_id}': {reason}"))
            return

        def change(deployment: Deployment, state: State, group: WorkerGroup) -> WorkerGroup | NoSuccessor:
            _require_wanted(group_id, group)
            if is_spare(group, deployment.groups):
                return NoSuccessor(reason)
            return rescheduling.unplaced(group, reason, time.time())

        await unplace(self._repository, group_id, change)

    async def _decide(self, group_id: str) -> _Committed | _Queued:
        """Place the group; newer samples are taken while freed memory may bring a place, or a better one.

        Errors: NoFeasiblePlan.
        """

        async for sample in self._samples():
            nodes = await self._cluster.nodes(wait=False)
            place = partial(self._place, group_id, sample, nodes)
            decision: _Committed | _Queued | None = await asyncio.to_thread(persist, place)
            if decision is not None:
                return decision
        raise AssertionError("no decision on the last sample")

    def _place(
        self, group_id: str, sample: _Sample, nodes: Sequence[NodeState]
    ) -> _Committed | _Queued | None:
        """Decide on the newest state and commit the decision. None without a commit: wait for newer samples.

        Blocking.

        Errors: NoFeasiblePlan; StaleWrite when something was placed or changed meanwhile: decide again.
        """
        state, base = self._repository.read(), base_of(group_id)
        deployment, group = find_group(state, group_id)
        _require_wanted(group_id, group)
        if base not in state.models:
            raise Superseded(base)
        usable = placement_decision.suited(without(sample.inventory, group.avoid), group.device_kind)
        try:
            place = self._find_placement(state, group_id, replace(sample, inventory=usable))
        except errors.NoFeasiblePlan as e:
            reason = _awaited(usable, e)
            if deployment.record.established or not reason:
                raise
            return self._look_again(group_id, state, reason)
        if place is None:
            return None
        if reclaimable_memory.waits_for_measuring(place, deployment.record.established):
            return self._wait(group_id, state, nodes, queue.waiting_reason(state, place.victims))
        return self._commit(group_id, state, usable, nodes, place)

    def _find_placement(self, state: State, group_id: str, sample: _Sample) -> Place | None:
        """The place; None when newer samples should be awaited. Errors: NoFeasiblePlan."""
        decide = partial(self._decide_placement, state, group_id)
        seen = self._free_memory(state, group_id, sample, sample.inventory)
        stopped_lately = sample.requested_s - self.stopped_s < SAMPLED_S
        after = _reclaimed(state, group_id, sample, stopped_lately)
        may_change = stopped_lately or after != sample.inventory
        if sample.last or not may_change:
            return reclaimable_memory.place(decide, seen)
        return reclaimable_memory.place_or_resample(
            decide, seen, self._free_memory(state, group_id, sample, after)
        )

    def _free_memory(self, state: State, group_id: str, sample: _Sample, inventory: Inventory) -> FreeMemory:
        """The memory of `inventory` that the group may use, without the load of engines' starts."""
        deployment, group = find_group(state, group_id)
        rested = reservations.without_starts(inventory, state, sample.requested_at_s)
        seen = reclaimable_memory.free_memory(
            rested, state.ledgers, self._settings.headroom, exclude=group_id
        )
        # No move is urgent enough to end a measurement or to wait for one.
        return seen.beside() if is_spare(group, deployment.record.groups) else seen

    def _decide_placement(self, state: State, group_id: str, free: Inventory) -> Placement:
        """Errors: NoFeasiblePlan."""
        base, (versioned, group) = base_of(group_id), find_group(state, group_id)
        others = placement_decision.exclude_group((d.record for d in state.deployments.values()), group_id)
        if group.replaces is not None:
            others = placement_decision.exclude_group(others, group_id_of(base, group.replaces))
        deployment = versioned.record if group.replaces is None else rebalancing.unrelaxed(versioned.record)
        model, variants = state.models[base].record, state.variants_of(base)
        known = measurements_of(state, self._settings, free.devices)
        return placement_decision.decide(model, deployment, free, self._settings, variants, known, others)

    def _commit(
        self, group_id: str, state: State, usable: Inventory, nodes: Sequence[NodeState], place: Place
    ) -> _Committed:
        """Commit the placement with its reservations, which replace those of its victims."""
        base, placement, (versioned, group) = base_of(group_id), place.placement, find_group(state, group_id)
        model, deployment, variants = state.models[base].record, versioned.record, state.variants_of(base)
        config = engine_config.engine_config(
            model, placement, self._settings, variants, deployment, group=group_id
        )
        config = replace(config, installation=self._repository.installation())
        excess = memory_feedback.applied(state.profiles, model, placement, usable, self._settings)
        now_s, ids = time.time(), ray_ids(nodes)
        begun = Put(mark_starting(deployment, group, placement, excess, now_s, ids), versioned.version)
        preempting = tuple(map(reservations.measuring, place.victims))
        reserved = reservations.reserve(state, group_id, deployment.uid, placement, now_s, preempting)
        self._repository.commit([begun, *_preempted(state, place.victims, group_id, now_s), *reserved])
        return _Committed(placement, deployment.uid, config, preempting)

    def _wait(self, group_id: str, state: State, nodes: Sequence[NodeState], reason: str) -> _Queued:
        """Commit that a group waits for room, and for what. It is due when devices or reservations change."""
        deployment, group = find_group(state, group_id)
        cluster = rescheduling.cluster_key(nodes, state.ledgers, exclude=group_id)
        waits = deployments.with_group(
            deployment.record, rescheduling.refused(group, reason, cluster, time.time())
        )
        self._repository.commit([Put(waits, deployment.version), *reservations.release(state, group_id)])
        return _Queued(reason)

    def _look_again(self, group_id: str, state: State, reason: str) -> _Queued:
        """Commit that a group has no place yet, and is due soon: nothing needs to make room for it."""
        deployment, group = find_group(state, group_id)
        waits = replace(group, reason=reason, retry_at_s=time.time() + AWAITED_S)
        record = deployments.with_group(deployment.record, waits)
        released = reservations.release(state, group_id)
        self._repository.commit([Put(record, deployment.version), *released])
        return _Queued(reason)

    async def _refused(self, group_id: str, error: errors.NoFeasiblePlan) -> None:
        """There is no room: a deployment that never served ends, and one that has served waits for room."""
        state, nodes = await self._repository.read_async(), await self._cluster.nodes(wait=False)
        versioned, _ = find_group(state, group_id)
        if not versioned.record.established:
            await self._fail(base_of(group_id), error)
            return

        def change(deployment: Deployment, state: State, group: WorkerGroup) -> WorkerGroup | NoSuccessor:
            _require_wanted(group_id, group)
            if is_spare(group, deployment.groups):
                return NoSuccessor(error.message)  # the group to be replaced stays where it is
            cluster = rescheduling.cluster_key(nodes, state.ledgers, exclude=group_id)
            return rescheduling.refused(group, error.message, cluster, time.time())

        await unplace(self._repository, group_id, change)
        log.warning("%s finds no place: %s", group_id, error.message)
        if not set(versioned.record.serving_ids()) - {group_id}:
            await self._fail(base_of(group_id), error)  # for the variants that wait for it

    async def _notify_waiting(self, base: str, message: str, progress: float) -> None:
        """Note a message in the operations of a base and of the variants that wait for it."""
        for versioned in (await self._repository.read_async()).deployments.values():
            deployment = versioned.record
            if deployment.base == base and deployment.phase in (Phase.PENDING, Phase.DEPLOYING):
                await self._note(OperationKind.DEPLOY, deployment.model, Phase.DEPLOYING, message, progress)


def _awaited(inventory: Inventory, refusal: errors.NoFeasiblePlan) -> str:
    """The reason to wait for nodes that may soon have room for the refused group; empty if there are none."""
    events = sorted({node.awaited for node in inventory.unusable if node.awaited})
    if not events or refusal.details.get("binding") != str(Constraint.MEMORY):
        return ""
    return f"waits until {' and '.join(events)}"


def _reclaimed(state: State, group_id: str, sample: _Sample, stopped_lately: bool) -> Inventory:
    """The devices of a sample after the processes of stopped engines have ended, named or unnamed."""
    unnamed_on = reclaimable_memory.measured_lately(state, sample.requested_at_s, SAMPLED_S)
    if stopped_lately:
        unnamed_on = reclaimable_memory.models(sample.inventory)
    return reclaimable_memory.reclaimed(sample.inventory, state.ledgers, group_id, unnamed_on)


def _preempted(state: State, keys: Sequence[str], group_id: str, now_s: float) -> list[Change]:
    """Changes that preempt the running measurements of these profiles for a group."""
    profiles = [state.profiles[key] for key in keys if key in state.profiles]
    return [
        Put(progress.preempted(profile.record, group_id, now_s), profile.version)
        for profile in profiles
        if profile.record.phase is Phase.PROFILING
    ]


def _is_cancelled(state: State, group_id: str) -> bool:
    operation = open_operation(state, OperationKind.DEPLOY, base_of(group_id))
    return operation is not None and operation.cancel_requested


def _require_wanted(group_id: str, group: WorkerGroup) -> None:
    """Raises Superseded when the group is being drained."""
    if group.phase is GroupPhase.DRAINING:
        raise Superseded(group_id)
