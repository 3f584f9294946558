"""The last work on a device that reads each slot: a copy into a slot waits for it, and for nothing else."""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterator
from contextlib import contextmanager

import torch


class SlotUses:
    """The last uses of slots. One thread begins steps; other threads ask. On a CPU a step ends before the
    next begins.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._lock = threading.Lock()
        self._steps: torch.cuda.Stream | None = None
        self._now: frozenset[int] = frozenset()  # slots of the newest step, whose end has no event yet
        self._ends: dict[int, torch.cuda.Event] = {}  # by slot: the end of the last earlier step that read it

    def begin_step(self, slots: Collection[int]) -> None:
        """Record that later work of the current stream reads these slots."""
        if self._device.type != "cuda":
            return
        stream = torch.cuda.current_stream(self._device)
        with self._lock:
            if self._now:
                end = torch.cuda.Event()
                end.record(stream)
                self._ends.update(dict.fromkeys(self._now, end))
            self._steps, self._now = stream, frozenset(slots)

    def wait(self, stream: torch.cuda.Stream, slot: int) -> None:
        """Make `stream` wait for the last step that reads a slot."""
        with self._lock:
            if self._steps is None or slot in self._now:
                stream.wait_stream(self._steps or torch.cuda.default_stream(self._device))
            elif (end := self._ends.get(slot)) is not None:
                stream.wait_event(end)

    @contextmanager
    def between_steps(self, stream: torch.cuda.Stream) -> Iterator[None]:
        """Within the context, the device's work runs between the work of earlier and of later steps.

        Later work of `stream` runs after it, too.
        """
        with self._lock:  # no first step begins meanwhile
            steps = self._steps
            with torch.cuda.stream(steps or stream):
                yield
            if steps is None:
                stream.synchronize()
            else:
                stream.wait_event(steps.record_event())
