"""Wake callers that wait for a change of one operation, when the gateway's copy of the records has it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from controlplane.state.records import Operation
from controlplane.state.repository import State, Versioned

Known = Versioned[Operation]


class OperationWatch:
    """For one event loop. `look` must be called with every new state.

    Waiting needs no reading. A new state only checks the operations that a caller waits for.
    """

    def __init__(self) -> None:
        self._operations: Mapping[str, Known] = {}
        self._revision = -1
        self._waiting: dict[str, set[asyncio.Event]] = {}
        self.waiting = 0

    def look(self, state: State) -> None:
        last, self._operations, self._revision = self._operations, state.operations, state.revision
        if last is self._operations:
            return
        for operation_id, waiting in self._waiting.items():
            if last.get(operation_id) is not self._operations.get(operation_id):
                for event in waiting:
                    event.set()

    async def changed(self, operation_id: str, known: Known, limit_s: float) -> Known | None:
        """The operation when it is newer than `known`, or `known` after `limit_s`. None: it was forgotten."""
        event = asyncio.Event()
        waiting = self._waiting.setdefault(operation_id, set())
        waiting.add(event)
        self.waiting += 1
        try:
            async with asyncio.timeout(limit_s):
                while True:
                    if self._revision >= known.version:  # not before the copy is as new as `known`
                        now = self._operations.get(operation_id)
                        if now is None or now.version > known.version:
                            return now
                    event.clear()
                    await event.wait()
        except TimeoutError:
            return known
        finally:
            self.waiting -= 1
            waiting.discard(event)
            if not waiting:
                self._waiting.pop(operation_id, None)
