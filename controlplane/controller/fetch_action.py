"""The controller's part in fetching: before a model is read, and before a node needs its files.

The files and their parts lie on the nodes, so whatever was killed, the next attempt continues there.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection, Iterable
from contextlib import aclosing, suppress
from dataclasses import replace

from controlplane import errors
from controlplane.controller.interfaces import Fetcher, Note
from controlplane.controller.stream_watchdog import watched
from controlplane.planning import fetching
from controlplane.planning.reconcile import BEING_READ
from controlplane.settings import Settings
from controlplane.state.records import Model, OperationKind, Phase
from controlplane.state.repository import Repository
from controlplane.state.transactions import Superseded, edit
from workers.fetching.messages import LINES, Failed, Fetched, FetchRequest, Progress

LOOK_S = 1.0
NOTE_EVERY_S = 2.0
AT_ONCE = 4
FETCHED_SHARE = 0.25  # of a registration's progress

Tell = Callable[[Progress], Awaitable[None]]


class FetchAction:
    """`registered` before a model's files are read; `ensure` before a node uses them."""

    def __init__(self, settings: Settings, repository: Repository, cluster: Fetcher, note: Note) -> None:
        self._settings = settings
        self._repository = repository
        self._cluster = cluster
        self._note = note
        self._turns = asyncio.Semaphore(AT_ONCE)

    async def registered(self, name: str) -> None:
        """Fetch the files of a model to be read, onto the controller's node, and record what came.

        Raises Superseded when the model is gone. Errors: those of sources; Unavailable when it was cut off.
        """
        model = await self._model(name)
        if model.phase not in BEING_READ:
            raise Superseded(name)

        async def tell(progress: Progress) -> None:
            done = FETCHED_SHARE * fetching.share(progress)
            await self._note(OperationKind.REGISTER, name, Phase.PENDING, fetching.described(progress), done)

        fetched = await self._fetch(model, "", tell)
        if fetched is None:
            return
        source = fetching.as_fetched(fetching.remote_uri(model), fetched)

        def keep(now: Model) -> Model:
            if now.uid != model.uid or now.phase not in BEING_READ:
                raise Superseded(name)
            return replace(now, fetched=source)

        await asyncio.to_thread(edit, self._repository, Model, name, keep)

    async def ensure(self, names: Iterable[str], nodes: Collection[str], tell: Tell) -> None:
        """Have the fetched files of these models on these nodes. Raises as `registered`."""
        for name in names:
            model = await self._model(name)
            if model.fetched is not None:
                for node in sorted(nodes):
                    await self._fetch(model, node, tell)

    async def _model(self, name: str) -> Model:
        versioned = (await self._repository.read_async()).models.get(name)
        if versioned is None:
            raise Superseded(name)
        return versioned.record

    async def _fetch(self, model: Model, node: str, tell: Tell) -> Fetched | None:
        async with self._turns:
            # Asked now, so that the folders in use are those of this moment.
            request = fetching.fetch_request(await self._repository.read_async(), model, self._settings)
            return None if request is None else await self._follow(model, request, node, tell)

    async def _follow(self, model: Model, request: FetchRequest, node: str, tell: Tell) -> Fetched:
        async def look() -> None:
            with suppress(errors.Unavailable):  # the store may be away for a moment
                if (await self._model(model.name)).uid != model.uid:
                    raise Superseded(model.name)

        told_s = float("-inf")
        async with aclosing(watched(self._cluster.fetch(request, node), look, LOOK_S)) as lines:
            async for text in lines:
                match LINES.validate_json(text):
                    case Fetched() as fetched:
                        return fetched
                    case Failed() as failed:
                        raise fetching.as_error(failed, model)
                    case Progress() as progress if progress.note or time.monotonic() - told_s >= NOTE_EVERY_S:
                        told_s = time.monotonic()
                        await tell(progress)
        raise errors.Unavailable("the process that fetches was cut off")
