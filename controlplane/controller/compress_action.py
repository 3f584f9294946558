"""The controller's part in making deltas: start compression, record its progress, register the result.

Everything is in the records and in the artefact's folder: after a crash, of the controller or of the
compressing process, the next one continues there.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import time
from collections.abc import Callable
from contextlib import aclosing, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

from controlplane import errors
from controlplane.cluster import reservations
from controlplane.controller.interfaces import Compressor, Hooks
from controlplane.controller.stream_watchdog import watched
from controlplane.controller.transitions import fail_registration, require_same
from controlplane.planning import accuracy, compressing, fetching
from controlplane.planning.compressing import CompressJob, Queued
from controlplane.planning.reconcile import BEING_READ
from controlplane.settings import Settings
from controlplane.state import deltas
from controlplane.state.deltas import Artifact, Delta
from controlplane.state.operations import End
from controlplane.state.records import Model, OperationKind, Phase
from controlplane.state.repository import Delete, Put, Repository, State, Versioned
from controlplane.state.transactions import Superseded, persist
from placement.types import Inventory
from workers.compression.lines import Done, Failed, Line, Progress, from_line
from workers.compression.timing import duration
from workers.fetching.messages import Progress as Fetching
from workers.group import jobs

log = logging.getLogger(__name__)

STALLED_S = 6 * 3600.0  # without progress: a task of a large model takes hours on a CPU
LIMIT_S = 86_400.0  # of one attempt
LOOK_S = 1.0  # between two checks whether it may begin or continue, and between two records of progress
READ_SHARE, MADE_SHARE = 0.02, 0.95  # parts of a registration's progress


class CompressActions:
    """One method per action of `reconcile`."""

    def __init__(
        self,
        settings: Settings,
        repository: Repository,
        cluster: Compressor,
        hooks: Hooks,
    ) -> None:
        self._settings = settings
        self._repository = repository
        self._cluster = cluster
        self._note, self._conclude, self._fetched = hooks.note, hooks.conclude, hooks.fetched

    async def begin(self, read: Model) -> None:
        """The fine-tune's files were checked: have it compressed."""

        def commit() -> None:
            state = self._repository.read()
            present = require_same(state.models, read.name, read.uid)
            if present.record.phase not in BEING_READ:
                raise Superseded(read.name)
            self._repository.commit([Put(read, present.version)])

        await asyncio.to_thread(persist, commit)
        await self._note(
            OperationKind.REGISTER, read.name, Phase.COMPRESSING, "waits to be compressed", READ_SHARE
        )

    async def compress(self, name: str) -> None:
        """Make a delta once its turn comes. It is repeated after it was cut off, and fails for good if
        another attempt would not help."""
        uid = _wanted(await self._repository.read_async(), name).record.uid
        try:
            job = await self._await_turn(name, uid)
            await self._have_files(name, job.node)
            artifact = await self._follow(name, uid, job)
        except (errors.StaleWrite, Superseded):
            raise
        except errors.Unavailable as e:
            await self._cut_off(name, uid, e.message)
            raise  # it is repeated after a pause
        except errors.OstinatoError as e:
            await self._fail(name, uid, e)
        else:
            await self._made(name, uid, artifact, job.request.artifact)

    async def _have_files(self, name: str, node: str) -> None:
        """Fetch what the compression reads: the fine-tune, and its base, whose weights may be evicted."""
        model = _wanted(await self._repository.read_async(), name).record

        async def tell(progress: Fetching) -> None:
            await self._tell(name, fetching.described(progress), READ_SHARE)

        await self._fetched([name, model.base or ""], [node], tell)

    async def remove(self, name: str) -> None:
        """Remove the files of a model that is being deleted, and forget the model."""
        state = await self._repository.read_async()
        versioned = state.models.get(name)
        if versioned is None or versioned.record.phase is not Phase.DELETING:
            raise Superseded(name)
        model = versioned.record
        await asyncio.to_thread(_remove, compressing.folder_of(model, self._settings))
        await self._conclude(
            OperationKind.DELETE,
            name,
            End(Phase.DELETED, "registration and compressed delta deleted; the fine-tune's files stay"),
            lambda s: [
                Delete(Model, name, require_same(s.models, name, model.uid).version),
                *reservations.release(s, reservations.compressing(name)),
            ],
        )

    # --- its turn ------------------------------------------------------------------------------

    async def _await_turn(self, name: str, uid: int) -> CompressJob:
        """Wait for the turn of a model. Errors: CompressionFailed when it will never come; Unavailable."""
        while True:
            try:
                inventory = await self._cluster.inventory()
            except Exception as e:
                raise errors.Unavailable(f"the controller cannot read the state of the devices: {e!r}") from e
            decide = partial(self._decide, name, uid, inventory)
            decision = await asyncio.to_thread(persist, decide)
            if isinstance(decision, CompressJob):
                return decision
            await self._tell(name, decision.reason, READ_SHARE)
            await asyncio.sleep(LOOK_S)

    def _decide(self, name: str, uid: int, inventory: Inventory) -> CompressJob | Queued:
        """Decide on the newest state; commit the start with its reservation, or the reason why it waits."""
        state, now_s = self._repository.read(), time.time()
        present = _wanted(state, name, uid)
        model, delta = present.record, compressing.require_delta(present.record)
        decision = compressing.next_job(state, name, inventory, self._settings)
        if isinstance(decision, CompressJob):
            begun = deltas.placed(delta, decision.node)
            reserved = reservations.reserve_to_compress(
                state, name, uid, decision.device, decision.memory_bytes, now_s
            )
            self._repository.commit([Put(_with(model, begun), present.version), *reserved])
        elif (queued := deltas.queued(delta, decision.reason)) != delta:
            released = reservations.release(state, reservations.compressing(name))
            self._repository.commit([Put(_with(model, queued), present.version), *released])
        return decision

    # --- while it is compressed ----------------------------------------------------------------

    async def _follow(self, name: str, uid: int, job: CompressJob) -> Artifact:
        """Follow a job to its result. Errors: CompressionFailed (reported by the job), Unavailable (cut
        off)."""

        pace = _Pace(LIMIT_S)

        async def look() -> None:
            pace.require_going_on(time.monotonic())
            with suppress(errors.Unavailable):  # the store may be unreachable only for a moment
                _wanted(await self._repository.read_async(), name, uid)

        noted_s = float("-inf")
        lines = self._cluster.compress(job.request, job.node)
        async with aclosing(watched(lines, look, LOOK_S)) as watching:
            async for text in watching:
                line = from_line(text)
                pace.heard(line, time.monotonic())
                match line:
                    case Done(artifact=artifact):
                        return artifact
                    case Failed(message=message):
                        raise errors.CompressionFailed(message)
                    case Progress() as progress if time.monotonic() - noted_s >= LOOK_S:
                        await self._progress(name, uid, progress)
                        noted_s = time.monotonic()
        raise errors.Unavailable("the compression ended without a result")

    async def _progress(self, name: str, uid: int, progress: Progress) -> None:
        delta = await self._edit(name, uid, lambda d: deltas.at(d, progress))
        await self._tell(name, _described(delta), READ_SHARE + (MADE_SHARE - READ_SHARE) * delta.share)

    async def _cut_off(self, name: str, uid: int, why: str) -> None:
        """Release the memory until the next start."""
        log.warning("the compression of '%s' was interrupted: %s", name, why)
        await self._edit(name, uid, lambda d: deltas.queued(d, why), release=True)

    async def _fail(self, name: str, uid: int, error: errors.OstinatoError) -> None:
        log.warning("'%s' cannot be compressed: %s", name, error.message)
        await self._conclude(
            OperationKind.REGISTER,
            name,
            End.failed(error),
            lambda s: fail_registration(s, name, uid, error.message),
        )

    async def _made(self, name: str, uid: int, artifact: Artifact, folder: Path) -> None:
        """The artefact exists: have it read like any variant's files."""

        def commit() -> None:
            state = self._repository.read()
            present = _wanted(state, name, uid)
            model, delta = present.record, compressing.require_delta(present.record)
            done = replace(delta, share=1.0, doing="done", left_s=None, node="", attempts=0)
            made = replace(
                model,
                phase=Phase.PENDING,
                adapter=str(folder),
                compression=accuracy.registered(model.compression, artifact.quality),
                delta=replace(done, artifact=artifact),
                reason="compressed; waits to be read",
                reads=0,
            )
            released = reservations.release(state, reservations.compressing(name))
            self._repository.commit([Put(made, present.version), *released])

        await asyncio.to_thread(persist, commit)
        await self._tell(name, "compressed; waits to be read", MADE_SHARE)

    # --- records -------------------------------------------------------------------------------

    async def _edit(
        self, name: str, uid: int, change: Callable[[Delta], Delta], release: bool = False
    ) -> Delta:
        """Change the delta. Raises Superseded when the model is gone or being deleted."""

        def once() -> Delta:
            state = self._repository.read()
            present = _wanted(state, name, uid)
            changed = change(compressing.require_delta(present.record))
            released = reservations.release(state, reservations.compressing(name)) if release else []
            self._repository.commit([Put(_with(present.record, changed), present.version), *released])
            return changed

        return await asyncio.to_thread(persist, once)

    async def _tell(self, name: str, message: str, share: float) -> None:
        await self._note(OperationKind.REGISTER, name, Phase.COMPRESSING, message, share)


class _Pace:
    """The duration of one attempt, and the time of its last progress: lines alone only show that it lives."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._began_s = self._moved_s = time.monotonic()
        self._last: tuple[float, str] | None = None

    def heard(self, line: Line, now_s: float) -> None:
        if isinstance(line, Progress) and (line.share, line.doing) != self._last:
            self._last, self._moved_s = (line.share, line.doing), now_s

    def require_going_on(self, now_s: float) -> None:
        """Errors: CompressionFailed (it takes too long), Unavailable (it hangs, and is started again)."""
        if now_s - self._began_s > self._limit_s:
            raise errors.CompressionFailed(
                f"the compression was stopped after {duration(self._limit_s)}, its time limit; "
                "use fewer calibration rows, a smaller model, or a GPU"
            )
        if now_s - self._moved_s > STALLED_S:
            raise errors.Unavailable(
                f"the compression made no progress for {duration(STALLED_S)} and was stopped"
            )


def _wanted(state: State, name: str, uid: int | None = None) -> Versioned[Model]:
    """The model that is to be compressed. Raises Superseded when it was replaced, or is no longer to be
    compressed."""
    versioned = state.models.get(name)
    if versioned is None or versioned.record.phase is not Phase.COMPRESSING:
        raise Superseded(name)
    if uid is not None and versioned.record.uid != uid:
        raise Superseded(name)
    return versioned


def _with(model: Model, delta: Delta) -> Model:
    return replace(model, delta=delta, reason=_described(delta))


def _described(delta: Delta) -> str:
    """The message for users who wait."""
    if not delta.node:
        return delta.doing
    left = "" if delta.left_s is None else f", about {duration(delta.left_s)} left"
    return f"compressing on {delta.node}: {delta.share:.0%}, {delta.doing}{left}"


def _remove(folder: Path) -> None:
    """Remove a folder. Blocking: an ended process may need a moment. Errors: Unavailable if it does not end,
    OSError."""
    if not folder.is_dir():
        return
    try:
        with jobs.alone(folder):
            shutil.rmtree(folder)
    except jobs.FolderBusy as e:
        raise errors.Unavailable(f"another process still works in {folder}") from e
