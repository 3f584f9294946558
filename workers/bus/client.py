"""The worker's requests to its engine's scheduler: load a variant, report residency, limit the variants at
once.
"""

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
    """An address for an engine's scheduler: its own socket file."""
    return f"ipc://{tempfile.gettempdir()}/ostinato-{uuid.uuid4().hex[:12]}"


class VariantClient:
    """Requests about one engine's variants, from an event loop. TimeoutError without an answer."""

    def __init__(self, address: str) -> None:
        self._loop = asyncio.get_running_loop()
        self._ids = itertools.count()
        self._pending: dict[str, asyncio.Future[Message]] = {}
        self._socket = RankSocket(address, f"worker-{os.getpid()}-{uuid.uuid4().hex[:6]}", self._received)

    async def prepare(self, uid: int, path: str, timeout_s: float = 300.0) -> None:
        """Make every rank read and check a variant.

        Raises CheckpointError (a ValueError) if its files are invalid, another ValueError if it cannot be
        served here, LoadFailed after any other failure.
        """
        reply = await self._ask({"ask": "prepare", "uid": uid, "path": path}, timeout_s)
        if reply["error"]:
            raise exception_of(reply.get("fault", ""), reply["error"])

    async def forget(self, uid: int, timeout_s: float = 10.0) -> None:
        """Free a variant that no new request will name, once its last request ends."""
        await self._ask({"ask": "forget", "uid": uid}, timeout_s)

    async def state(self, timeout_s: float = 10.0) -> dict[str, Any]:
        """Slots, limit, and every variant's tier, bytes by rank and reason."""
        return await self._ask({"ask": "state"}, timeout_s)

    async def limit(self, variants: int, timeout_s: float = 10.0) -> int:
        """Set how many variants run at once (DeltaZip's N); returns the new limit."""
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
        """Handle an answer in the socket's thread."""
        self._loop.call_soon_threadsafe(self._settle, message)

    def _settle(self, message: Message) -> None:
        answer = self._pending.get(message["id"])
        if answer is not None and not answer.done():
            answer.set_result(message)

    def close(self) -> None:
        self._socket.close()


__all__ = ["ADDRESS_VARIABLE", "VariantClient", "new_address"]
