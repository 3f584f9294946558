"""The controller's part in profiles: start measurements, record them, and inform waiting operations.

Everything is in the records: after a crash the next controller continues with the missing loads. If a profile
fails, its models are registered nevertheless, with rough estimates of their plans.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Sequence
from contextlib import aclosing, suppress
from dataclasses import replace
from functools import partial

from controlplane import errors
from controlplane.cluster import reservations
from controlplane.controller.interfaces import Conclude, Measurer, Note
from controlplane.controller.stream_watchdog import watched
from controlplane.controller.transitions import require_same
from controlplane.profiling import keys, progress, queue
from controlplane.profiling.job import ProfilingJob
from controlplane.profiling.queue import Queued
from controlplane.settings import Settings
from controlplane.state.operations import End
from controlplane.state.records import Model, ModelProfile, OperationKind, Phase
from controlplane.state.repository import Change, Put, Repository, State, Versioned
from controlplane.state.transactions import Superseded, edit, persist
from placement.types import Inventory

log = logging.getLogger(__name__)

READ_SHARE = 0.3  # the part of a registration's progress for reading its files
LOOK_S = 1.0  # between two checks whether a profile may begin, or its measurement should continue
RECLAIM_WAIT_S = 10.0  # longest wait for stopped engines to free their memory
AWAITING_RECLAIM = "waits until stopped processes have freed their device memory"
OVERTIME_S = 90.0  # beyond its limit, for starting and ending; a measurement that takes longer hangs


class ProfileActions:
    """One method per action of `reconcile`; `note` and `conclude` are the controller's."""

    def __init__(
        self,
        settings: Settings,
        repository: Repository,
        cluster: Measurer,
        note: Note,
        conclude: Conclude,
    ) -> None:
        self._settings = settings
        self._repository = repository
        self._cluster = cluster
        self._note = note
        self._conclude = conclude

    async def _edit(self, key: str, change: Callable[[ModelProfile], ModelProfile]) -> ModelProfile:
        return (await asyncio.to_thread(edit, self._repository, ModelProfile, key, change)).record

    # --- registration --------------------------------------------------------------------------

    async def admit_or_measure(self, ready: Model) -> None:
        """End the registration of a model whose files were read, or have its architecture measured first."""
        if ready.is_variant or not self._settings.measures:
            await self._admit(ready, ready.reason)
            return
        key = keys.key_of_model(ready, await self._devices(), self._settings)
        if key is None:
            await self._admit(ready, f"{ready.reason}; not profiled, because there is no device")
            return
        queued = replace(ready, phase=Phase.PROFILING, profile=key.text)
        await self._note(
            OperationKind.REGISTER, ready.name, Phase.PROFILING, f"{ready.reason}; read", READ_SHARE
        )
        fresh = progress.fresh_profile(key, time.time(), keys.quantizations_to_measure(ready, key))

        def commit() -> None:
            state = self._repository.read()
            begun = _begun(state, fresh, (Phase.CANCELLED,))
            self._repository.commit(
                [Put(queued, require_same(state.models, ready.name, ready.uid).version), *begun]
            )

        await asyncio.to_thread(persist, commit)

    async def admit(self, name: str) -> None:
        """A model's files are read and its profile is settled: make it Ready, profiled or not."""
        state = await self._repository.read_async()
        if name not in state.models:
            raise Superseded(name)
        model = state.models[name].record
        profile = progress.settled_profile(state, model)
        await self._admit(replace(model, phase=Phase.READY), f"{model.reason}; {_outcome(profile, name)}")

    async def _admit(self, model: Model, message: str) -> None:
        await self._conclude(
            OperationKind.REGISTER,
            model.name,
            End(Phase.READY, message),
            lambda s: [Put(model, _registering(s, model).version)],
        )

    # --- a profile that was requested ----------------------------------------------------------

    async def begin(self, name: str) -> None:
        """Determine the profile that a registered model needs, and have it measured unless it exists."""
        state = await self._repository.read_async()
        if name not in state.models:
            await self._answer(
                name,
                End.failed(
                    errors.ModelNotFound(f"'{name}' was deleted during the operation; register it again")
                ),
            )
            return
        model = state.models[name].record
        key = keys.key_of_model(model, await self._devices(), self._settings)
        if key is None:
            lacking = errors.ProfilingFailed(
                "the cluster has no device to measure on; add a device, then profile the model again"
            )
            await self._answer(name, End.failed(lacking))
            return
        fresh = progress.fresh_profile(key, time.time(), keys.quantizations_to_measure(model, key))

        def commit() -> None:
            state = self._repository.read()
            registered = state.models.get(name)
            if registered is None or registered.record.uid != model.uid:
                raise Superseded(name)
            begun = _begun(state, fresh, (Phase.CANCELLED, Phase.FAILED, Phase.READY))
            known = replace(registered.record, profile=key.text)
            self._repository.commit([Put(known, registered.version), *begun])

        await asyncio.to_thread(persist, commit)
        await self._note(OperationKind.PROFILE, name, Phase.PROFILING, "waits to be measured", 0.05)

    async def end(self, name: str) -> None:
        """End an operation whose profile is settled, with its result."""
        state = await self._repository.read_async()
        model = state.models.get(name)
        profile = progress.settled_profile(state, model.record) if model else None
        if profile is None:
            gone = errors.ProfilingFailed(f"the profile of '{name}' was deleted; profile the model again")
            await self._answer(name, End.failed(gone))
        elif profile.phase is Phase.READY:
            await self._answer(name, End(Phase.READY, profile.reason))
        else:
            await self._answer(name, End.failed(errors.ProfilingFailed(profile.reason)))

    async def _answer(self, name: str, end: End) -> None:
        await self._conclude(OperationKind.PROFILE, name, end, lambda s: [])

    # --- measuring -----------------------------------------------------------------------------

    async def measure(self, key: str) -> None:
        """Measure what a profile lacks once its turn comes, and always settle it."""
        try:
            job = await self._await_turn(key)
            await self._follow(key, job)
        except (errors.Unavailable, errors.StaleWrite, Superseded):
            raise  # a problem of the state store: the action is repeated
        except _Abandoned:
            await self._settle_abandoned(key)
        except _Preempted as e:
            await self._notify(key, str(e))
        except errors.OstinatoError as e:
            await self._settle(key, e.message)
        except Exception as e:
            log.exception("measuring %s failed", key)
            await self._settle(key, f"an unexpected error: {e!r}")
        else:
            await self._end(key, lambda _, p: progress.done(p, job, time.time()))

    async def _await_turn(self, key: str) -> ProfilingJob:
        """Wait until nothing else is measured on the devices that this profile needs.

        It waits at most RECLAIM_WAIT_S until the devices show the memory of stopped engines as free. Errors:
        ProfilingFailed.
        """
        give_up_s = math.inf
        seen: tuple[int, Inventory] | None = None
        while True:
            inventory = await self._look_at_devices()
            last, seen = seen, (await asyncio.to_thread(self._repository.revision), inventory)
            if seen == last and give_up_s == math.inf:  # no decision depends on time alone
                await asyncio.sleep(LOOK_S)
                continue
            patient = time.monotonic() < give_up_s
            decision = await asyncio.to_thread(persist, partial(self._begin, key, inventory, patient))
            if isinstance(decision, ProfilingJob):
                return decision
            reclaims = decision.reason == AWAITING_RECLAIM
            give_up_s = min(give_up_s, time.monotonic() + RECLAIM_WAIT_S) if reclaims else math.inf
            await self._notify(key, decision.reason)
            await asyncio.sleep(LOOK_S)

    async def _devices(self) -> Inventory:
        """The devices; if there are none, those of the nodes that are expected to have devices soon."""
        while True:
            inventory = await self._cluster.inventory()
            if inventory.devices or not any(node.awaited for node in inventory.unusable):
                return inventory
            await asyncio.sleep(LOOK_S)

    async def _look_at_devices(self) -> Inventory:
        """The devices. Errors: Unavailable for any failure; it is repeated, since the profile is not the
        cause."""
        try:
            return await self._cluster.inventory()
        except Exception as e:
            log.exception("the controller cannot read the state of the devices")
            raise errors.Unavailable(f"the controller cannot read the state of the devices: {e!r}") from e

    def _begin(self, key: str, inventory: Inventory, patient: bool) -> ProfilingJob | Queued:
        """Decide on the newest state. Commit the start with reservations, or the wait without reservations.

        Blocking. Errors: StaleWrite when something was placed or changed meanwhile.
        """
        state, now_s = self._repository.read(), time.time()
        profile = _wanted(state, key)
        if profile.attempts >= progress.MAX_ATTEMPTS:
            tries = f"{profile.attempts} attempts ended before the first measurement"
            raise errors.ProfilingFailed(f"{tries}; {profile.reason}")
        version = state.profiles[key].version
        decision = self._decide(state, key, inventory, patient)
        if isinstance(decision, ProfilingJob):
            begun = Put(progress.attempted(profile, decision, now_s), version)
            reserved = reservations.reserve_to_measure(
                state, key, profile.rounds, decision.held, decision.held_bytes, now_s
            )
            self._repository.commit([begun, *reserved])
        elif (queued := progress.queued(profile, decision.reason, now_s)) != profile:
            self._repository.commit(
                [Put(queued, version), *reservations.release(state, reservations.measuring(key))]
            )
        return decision

    def _decide(self, state: State, key: str, inventory: Inventory, patient: bool) -> ProfilingJob | Queued:
        """With `patient`, wait for memory that stopped engines still hold, instead of starting with less or
        failing."""
        reclaims = patient and queue.has_stale_holders(state, key, inventory, self._settings)
        try:
            decision = queue.next_job(state, key, inventory, self._settings)
        except errors.ProfilingFailed:
            if not reclaims:
                raise
            return Queued(AWAITING_RECLAIM)
        return Queued(AWAITING_RECLAIM) if reclaims and isinstance(decision, ProfilingJob) else decision

    async def _follow(self, key: str, job: ProfilingJob) -> None:
        """Record each measurement as it comes. Raises _Abandoned or _Preempted when the measurement must
        stop.

        Errors: ProfilingFailed.
        """
        limit_s = job.request.seconds + OVERTIME_S
        await self._notify(key, job.beginning)
        began_s = last_s = time.monotonic()

        async def look() -> None:
            with suppress(errors.Unavailable):  # perhaps only for a moment, so the engine stays
                _require_measured(await self._repository.read_async(), key)
            if time.monotonic() - began_s > limit_s:
                raise errors.ProfilingFailed(
                    f"the measurement did not end within {limit_s:.0f} s and was stopped"
                )

        try:
            measurements = self._cluster.measure(job.request, job.node)
            async with aclosing(watched(measurements, look, LOOK_S)) as lines:
                async for line in lines:
                    now_s = time.monotonic()
                    took_s, last_s = now_s - last_s, now_s
                    profile = await self._add(key, line, job, took_s)
                    await self._notify(key, profile.reason)
        except Exception:
            # The holder that took its memory may have made it fail.
            _require_measured(await self._repository.read_async(), key)
            raise

    async def _add(self, key: str, line: str, job: ProfilingJob, took_s: float) -> ModelProfile:
        try:
            busy = reservations.busy_with_others(await self._cluster.inventory(), job.held, key)
        except Exception:  # the measurement counts nevertheless
            log.warning("the load of the devices while %s is measured is unknown", key, exc_info=True)
            busy = None
        return await self._edit(
            key, lambda p: progress.with_line(p, line, job.points, took_s, time.time(), busy)
        )

    async def _settle(self, key: str, problem: str) -> None:
        log.warning("the profile %s: %s", key, problem)
        await self._end(key, lambda _, p: progress.ended(p, problem, time.time()))

    async def _settle_abandoned(self, key: str) -> None:
        def change(state: State, profile: ModelProfile) -> ModelProfile:
            if _is_awaited(state, key):  # an operation waits for it again
                return progress.resumed(profile, time.time())
            reason = "no operation waits for this profile any longer; finished measurements are kept"
            return replace(profile, phase=Phase.CANCELLED, reason=reason, updated_at_s=time.time())

        await self._end(key, change)

    async def _end(self, key: str, change: Callable[[State, ModelProfile], ModelProfile]) -> None:
        """Commit the profile's end together with the release of its reservations."""

        def once() -> None:
            state = self._repository.read()
            profile = state.profiles.get(key)
            if profile is None:
                raise Superseded(key)
            released = reservations.release(state, reservations.measuring(key))
            self._repository.commit([Put(change(state, profile.record), profile.version), *released])

        await asyncio.to_thread(persist, once)

    async def _notify(self, key: str, message: str) -> None:
        state = await self._repository.read_async()
        if key not in state.profiles:
            raise Superseded(key)
        profile = state.profiles[key].record
        share = min(1.0, profile.points / max(1, profile.all_points))
        for op in progress.waiting(state, key):
            if op.reason != message:
                done = READ_SHARE + (1 - READ_SHARE) * 0.95 * share
                await self._note(op.kind, op.target, Phase.PROFILING, message, done)


def _registering(state: State, model: Model) -> Versioned[Model]:
    """The model as recorded. Raises Superseded when it is gone, or is to be deleted."""
    present = require_same(state.models, model.name, model.uid)
    if present.record.phase is Phase.DELETING:
        raise Superseded(model.name)
    return present


class _Abandoned(Exception):
    """No operation waits for the profile any longer."""


class _Preempted(Exception):
    """The profile's memory was given to an engine; the message names it."""


def _wanted(state: State, key: str) -> ModelProfile:
    """The profile to be measured. Raises Superseded when it is settled, _Abandoned if no operation waits."""
    profile = state.profiles.get(key)
    if profile is None or profile.record.settled:
        raise Superseded(key)
    if not _is_awaited(state, key):
        raise _Abandoned
    return profile.record


def _is_awaited(state: State, key: str) -> bool:
    return progress.subject(state, key) is not None and any(progress.waiting(state, key))


def _require_measured(state: State, key: str) -> None:
    """Raises Superseded, _Abandoned, or _Preempted when a group took the memory that was reserved for it."""
    profile = _wanted(state, key)
    if profile.phase is not Phase.PROFILING:
        raise _Preempted(profile.reason)


def _begun(state: State, fresh: ModelProfile, resume: Sequence[Phase]) -> list[Change]:
    """Create the profile, or resume it if it lacks measurements.

    A profile is resumed if its phase is in `resume`, and in any phase if quantizations were added.
    """
    present = state.profiles.get(fresh.key)
    if present is None:
        return [Put(fresh, 0)]
    wanted = progress.with_quantizations(present.record, fresh.forms)
    if not wanted.settled:  # a writer that settles it on an older state has to decide again
        return [Put(wanted, present.version)]
    if wanted != present.record or (wanted.phase in resume and not progress.is_whole(wanted)):
        return [Put(progress.resumed(wanted, time.time()), present.version)]
    return []


def _outcome(profile: ModelProfile | None, name: str) -> str:
    if profile is not None and profile.phase is Phase.READY:
        return f"profile: {profile.reason}"
    why = profile.reason if profile else "its profile was deleted"
    return f"not profiled ({why}), so its estimates are rough; `ostinato profile {name}` tries again"
