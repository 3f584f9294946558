"""The time on the device of every replay of a captured CUDA graph, for measurements.

vLLM replays graphs by the class's method, and reports no times of its steps on the device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from profiler.patches.target import Target

REPLAY = Target("torch.cuda.graphs", "CUDAGraph.replay", read={"2.13": "9f22884f9461"})


class GraphReplays:
    """Times replays of this process from its creation until `end`."""

    def __init__(self) -> None:
        self._timed: dict[int, list[tuple[Any, Any]]] = {}
        self._put_back = REPLAY.replace(self._timing)

    def end(self) -> list[list[float]]:
        """The milliseconds of each replay, by graph."""
        torch.cuda.synchronize()
        self._put_back()
        return [[begin.elapsed_time(end) for begin, end in events] for events in self._timed.values()]

    def _timing(self, replay: Callable[[Any], None]) -> Callable[[Any], None]:
        def replay_timed(graph: Any) -> None:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            replay(graph)
            end.record()
            self._timed.setdefault(id(graph), []).append((begin, end))

        return replay_timed
