"""A limit on how long a request may take, at less cost than `asyncio.timeout`."""

from __future__ import annotations

import asyncio
from types import TracebackType


class TimeLimit:
    """A context, in one task. What goes on in it longer than `limit_s` is cancelled, and the context raises
    TimeoutError; any other cancellation passes."""

    __slots__ = ("_before", "_is_over", "_limit_s", "_task", "_timer")

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._is_over = False

    def __enter__(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._before = task.cancelling()
        self._timer = asyncio.get_running_loop().call_later(self._limit_s, self._end)

    def _end(self) -> None:
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
