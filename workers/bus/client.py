"""The worker's questions to its engine's scheduler: load this, what is where, how many at once."""

from __future__ import annotations

import asyncio
import itertools
import os
import tempfile
import uuid
from typing import Any

from workers.bus.faults import exception_of
from workers.bus.sockets import Message, RankSocket
from workers.variant_config import ADDRESS_VARIABLE


def new_address() -> str:
    """Where an engine's scheduler will listen: a socket file of its own."""
    return f"ipc://{tempfile.gettempdir()}/ostinato-{uuid.uuid4().hex[:12]}"


class VariantClient:
    """Questions about one engine's variants, from an event loop. TimeoutError where no answer comes."""

    def __init__(self, address: str) -> None:
        self._loop = asyncio.get_running_loop()
        self._ids = itertools.count()
        self._pending: dict[str, asyncio.Future[Message]] = {}
        self._socket = RankSocket(address, f"worker-{os.getpid()}-{uuid.uuid4().hex[:6]}", self._received)

    async def prepare(self, uid: int, path: str, timeout_s: float = 300.0) -> None:
        """Have every rank read and check a variant.

        Raises CheckpointError (a ValueError) when its files are not sound, another ValueError when it cannot
        be served here, LoadFailed when something else went wrong.
        """
        reply = await self._ask({"ask": "prepare", "uid": uid, "path": path}, timeout_s)
        if reply["error"]:
            raise exception_of(reply.get("fault", ""), reply["error"])

    async def forget(self, uid: int, timeout_s: float = 10.0) -> None:
        """Free what the engine holds of a variant that no new request will name, once the last one ends."""
        await self._ask({"ask": "forget", "uid": uid}, timeout_s)

    async def state(self, timeout_s: float = 10.0) -> dict[str, Any]:
        """Slots, limit, and every variant's tier, bytes by rank and reason."""
        return await self._ask({"ask": "state"}, timeout_s)

    async def limit(self, variants: int, timeout_s: float = 10.0) -> int:
        """Set how many variants run at once (DeltaZip's N); returns what it is now."""
        return int((await self._ask({"ask": "limit", "limit": variants}, timeout_s))["limit"])

    async def _ask(self, question: Message, timeout_s: float) -> Message:
        question_id = str(next(self._ids))
        answer: asyncio.Future[Message] = self._loop.create_future()
        self._pending[question_id] = answer
        self._socket.send({**question, "id": question_id})
        try:
            return await asyncio.wait_for(answer, timeout_s)
        finally:
            self._pending.pop(question_id, None)

    def _received(self, message: Message) -> None:
        """In the socket's thread."""
        self._loop.call_soon_threadsafe(self._settle, message)

    def _settle(self, message: Message) -> None:
        answer = self._pending.get(message["id"])
        if answer is not None and not answer.done():
            answer.set_result(message)

    def close(self) -> None:
        self._socket.close()


__all__ = ["ADDRESS_VARIABLE", "VariantClient", "new_address"]
