"""The controller's part in profiles: have them measured, keep each measurement, tell those who wait.

Everything is in the records: killed at any point, its successor goes on with the loads that are lacking. A
profile that fails takes nothing with it; its models are registered, and their plans estimated roughly.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Protocol

from controlplane import errors, ledger, profiling
from controlplane.endings import End, persist, same
from controlplane.profiling import Mission
from controlplane.records import Model, ModelProfile, OperationKind, Phase
from controlplane.settings import Settings
from controlplane.state.typed import Change, Put, Repository, State
from controlplane.store_edits import Gone, edit
from placement.types import Inventory
from workers.measuring.order import MeasureOrder

log = logging.getLogger(__name__)

READ_SHARE = 0.3  # of a registration's progress is done when its files are read


class Measurer(Protocol):
    """What is needed of the cluster."""

    async def inventory(self) -> Inventory: ...

    def measure(self, order: MeasureOrder, node: str) -> AsyncGenerator[str, None]:
        """Lines of measurements as they are made on `node`. Closing it ends the measuring.

        Raises ProfilingFailed, after what was measured before.
        """
        ...


class Note(Protocol):
    def __call__(
        self, kind: OperationKind, target: str, phase: Phase, message: str, progress: float | None = None
    ) -> Awaitable[None]: ...


Conclude = Callable[
    [OperationKind, str, End, Callable[[State], Sequence[Change]]],
    Awaitable[None],
]


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

    async def _read(self) -> State:
        return await asyncio.to_thread(self._repository.read)

    async def _edit(self, key: str, change: Callable[[ModelProfile], ModelProfile]) -> ModelProfile:
        return (await asyncio.to_thread(edit, self._repository, ModelProfile, key, change)).record

    # --- registration --------------------------------------------------------------------------

    async def admit_or_measure(self, ready: Model) -> None:
        """End the registration of a model whose files were read, or have its architecture measured first."""
        if ready.is_variant or not self._settings.profile or self._settings.engine != "vllm":
            await self._admit(ready, ready.reason)
            return
        inventory = await self._cluster.inventory()
        key = profiling.key_of_model(ready, inventory, self._settings)
        if key is None:
            await self._admit(ready, f"{ready.reason}; not profiled, for there is no device")
            return
        waits = replace(ready, phase=Phase.PROFILING, profile=key.text)
        await self._note(
            OperationKind.REGISTER, ready.name, Phase.PROFILING, f"{ready.reason}; read", READ_SHARE
        )
        fresh = profiling.fresh_profile(key, time.time())

        def commit() -> None:
            state = self._repository.read()
            begun = _begun(state, fresh, (Phase.CANCELLED,))
            self._repository.commit([Put(waits, same(state.models, ready.name, ready.uid).version), *begun])

        await asyncio.to_thread(persist, commit)

    async def admit(self, name: str) -> None:
        """A model's files are read and its profile is settled: it is Ready, profiled or not."""
        state = await self._read()
        if name not in state.models:
            raise Gone(name)
        model = state.models[name].record
        profile = profiling.settled_profile(state, model)
        await self._admit(replace(model, phase=Phase.READY), f"{model.reason}; {_outcome(profile, name)}")

    async def _admit(self, model: Model, message: str) -> None:
        await self._conclude(
            OperationKind.REGISTER,
            model.name,
            End(Phase.READY, message),
            lambda s: [Put(model, same(s.models, model.name, model.uid).version)],
        )

    # --- a profile that was asked for ----------------------------------------------------------

    async def begin(self, name: str) -> None:
        """Find out which profile a registered model needs; it is measured unless it is there."""
        state = await self._read()
        if name not in state.models:
            await self._answer(name, End.failed(errors.ModelNotFound(f"'{name}' was deleted meanwhile")))
            return
        model = state.models[name].record
        key = profiling.key_of_model(model, await self._cluster.inventory(), self._settings)
        if key is None:
            lacking = errors.ProfilingFailed("there is no device to measure on; add one and profile again")
            await self._answer(name, End.failed(lacking))
            return
        fresh = profiling.fresh_profile(key, time.time())

        def commit() -> None:
            state = self._repository.read()
            found = state.models.get(name)
            if found is None or found.record.uid != model.uid:
                raise Gone(name)
            begun = _begun(state, fresh, (Phase.CANCELLED, Phase.FAILED, Phase.READY))
            known = replace(found.record, profile=key.text)
            self._repository.commit([Put(known, found.version), *begun])

        await asyncio.to_thread(persist, commit)
        await self._note(OperationKind.PROFILE, name, Phase.PROFILING, "waits to be measured", 0.05)

    async def end(self, name: str) -> None:
        """The profile that an operation asked for is settled: say what came of it."""
        state = await self._read()
        found = state.models.get(name)
        profile = profiling.settled_profile(state, found.record) if found else None
        if profile is None:
            gone = errors.ProfilingFailed(f"the profile of '{name}' is gone; profile it again")
            await self._answer(name, End.failed(gone))
        elif profile.phase is Phase.READY:
            await self._answer(name, End(Phase.READY, profile.reason))
        else:
            await self._answer(name, End.failed(errors.ProfilingFailed(profile.reason)))

    async def _answer(self, name: str, end: End) -> None:
        await self._conclude(OperationKind.PROFILE, name, end, lambda s: [])

    # --- measuring -----------------------------------------------------------------------------

    async def measure(self, key: str) -> None:
        """Measure what a profile lacks, and settle it whatever happens."""
        state = await self._read()
        found = state.profiles.get(key)
        if found is None or found.record.settled:
            raise Gone(key)
        model = profiling.subject(state, key)
        if model is None or not any(profiling.waiting(state, key)):
            await self._settle_abandoned(key)
            return
        if found.record.attempts >= profiling.MOST_ATTEMPTS:
            tries = f"{found.record.attempts} attempts brought nothing"
            await self._settle(key, f"{tries}; {found.record.reason}")
            return
        profile = await self._edit(key, lambda p: profiling.attempted(p, time.time()))
        try:
            inventory = await self._cluster.inventory()
            free = ledger.available(inventory, (await self._read()).ledgers, self._settings.headroom)
            task = profiling.mission(profile, model, free, self._settings)
            abandoned = await self._follow(key, task, profile.points)
        except (errors.Unavailable, errors.StaleWrite, Gone):
            raise  # the state store's matter: tried again
        except errors.OstinatoError as e:
            await self._settle(key, e.message)
        except Exception as e:
            log.exception("measuring %s failed", key)
            await self._settle(key, f"an unexpected error: {e!r}")
        else:
            await (self._settle_abandoned(key) if abandoned else self._settle(key, ""))

    async def _follow(self, key: str, task: Mission, done: int) -> bool:
        """Keep each measurement as it comes. Returns True, and stops, once nobody waits any more."""
        kind = task.order.device_kind
        told = f"measuring its architecture on {kind} of {task.node}: an engine with made-up weights starts"
        await self._tell(key, told, done / max(1, task.points))
        last_s = time.monotonic()
        async with aclosing(self._cluster.measure(task.order, task.node)) as lines:
            async for line in lines:
                now_s = time.monotonic()
                took_s, last_s = now_s - last_s, now_s
                profile = await self._add(key, line, task.points, took_s)
                await self._tell(key, profile.reason, profile.points / max(1, task.points))
                if not any(profiling.waiting(await self._read(), key)):
                    return True
        return False

    async def _add(self, key: str, line: str, points: int, took_s: float) -> ModelProfile:
        return await self._edit(key, lambda p: profiling.with_line(p, line, points, took_s, time.time()))

    async def _settle(self, key: str, problem: str) -> None:
        if problem:
            log.warning("the profile %s: %s", key, problem)
        await self._edit(key, lambda p: profiling.ended(p, problem, time.time()))

    async def _settle_abandoned(self, key: str) -> None:
        reason = "nobody waits for it any more; what was measured is kept"
        await self._edit(
            key, lambda p: replace(p, phase=Phase.CANCELLED, reason=reason, updated_at_s=time.time())
        )

    async def _tell(self, key: str, message: str, share: float) -> None:
        for op in profiling.waiting(await self._read(), key):
            progress = READ_SHARE + (1 - READ_SHARE) * 0.95 * min(1.0, share)
            await self._note(op.kind, op.target, Phase.PROFILING, message, progress)


def _begun(state: State, fresh: ModelProfile, resume: Sequence[Phase]) -> list[Change]:
    """The profile, new if there is none; one that is not whole goes on from the phases `resume`."""
    present = state.profiles.get(fresh.key)
    if present is None:
        return [Put(fresh, 0)]
    if present.record.phase in resume and not profiling.is_whole(present.record):
        return [Put(profiling.resumed(present.record, time.time()), present.version)]
    return []


def _outcome(profile: ModelProfile | None, name: str) -> str:
    if profile is not None and profile.phase is Phase.READY:
        return f"profile: {profile.reason}"
    why = profile.reason if profile else "its profile is gone"
    return f"not profiled ({why}), so its estimates are rough; `ostinato profile {name}` tries again"
