"""A limit on how long a request may take, at less cost than `asyncio.timeout`."""

from __future__ import annotations

import asyncio
import math
from types import TracebackType
from typing import Self

from starlette.types import Message, Send

from controlplane import errors


class TimeLimit:
    """A context in one task. If its body takes longer than `limit_s`, the body is cancelled and the context
    raises TimeoutError. Any other cancellation passes through.

    Between `pause` and `go_on` nothing is cancelled: if the time is over, `go_on` raises TimeoutError.
    """

    __slots__ = ("_before", "_is_due", "_is_over", "_is_paused", "_limit_s", "_task", "_timer")

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._is_over = self._is_paused = self._is_due = False

    def pause(self) -> None:
        self._is_paused = True

    def go_on(self) -> None:
        self._is_paused = False
        if self._is_due:
            raise TimeoutError

    def __enter__(self) -> Self:
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._before = task.cancelling()
        self._timer = asyncio.get_running_loop().call_later(self._limit_s, self._end)
        return self

    def _end(self) -> None:
        if self._is_paused:
            self._is_due = True
            return
        self._is_over = True
        self._task.cancel()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._timer.cancel()
        if not self._is_over:
            return
        others = self._task.uncancel() > self._before
        if isinstance(error, asyncio.CancelledError) and not others:
            raise TimeoutError from error


class WriteLimit(TimeLimit):
    """A limit on each message sent by `send`; the time between messages is not limited."""

    __slots__ = ("_send", "_since_s")

    def __init__(self, limit_s: float, send: Send) -> None:
        super().__init__(limit_s)
        self._send = send
        self._since_s = math.inf

    async def send(self, message: Message) -> None:
        self._since_s = asyncio.get_running_loop().time()
        await self._send(message)
        self._since_s = math.inf

    def _end(self) -> None:
        loop = asyncio.get_running_loop()
        left_s = min(self._limit_s, self._since_s + self._limit_s - loop.time())
        if left_s > 0:
            self._timer = loop.call_later(left_s, self._end)
        else:
            super()._end()


def timed_out(limit_s: float) -> errors.TimedOut:
    return errors.TimedOut(
        f"the request took longer than the allowed {limit_s:g} s (OSTINATO_REQUEST_TIMEOUT_S)"
    )
