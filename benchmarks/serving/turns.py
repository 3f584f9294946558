"""The baseline's scheduler: ours, but a step is of one model; models take turns of a few steps."""

from __future__ import annotations

from typing import Any

from benchmarks.serving.settings import SwapConfig
from benchmarks.serving.taking_turns import Turns
from workers.engine.scheduler import (
    AsyncVariantScheduler,
    Held,
    SyncVariantScheduler,
    _hold_back,
    _Variants,
)
from workers.scheduling.admission_records import variant_of

# vLLM's limits of `running`; the second is there from 0.32 on.
MAX_RUNNING = ("max_num_running_reqs", "max_num_active_reqs")


class _OneModelAStep(_Variants):
    """Over our scheduler: after its decision, requests of other models are hidden from vLLM for a step.

    Those that run keep their KV blocks meanwhile. When blocks run out vLLM preempts among the model's own.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._turns = Turns(SwapConfig.of(self.vllm_config).quantum)
        self._hidden: list[Any] = []

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        most = {name: getattr(self, name) for name in MAX_RUNNING if hasattr(self, name)}
        try:
            output = super().schedule(*args, **kwargs)
        finally:
            self.running = self._hidden + self.running
            self._hidden = []
            self.__dict__.update(most)
        if output.total_num_scheduled_tokens == 0:
            self._turns.end()
        return output

    def _admit(self) -> list[Held]:
        held = super()._admit()
        waiting = {variant_of(r) for queue in self._queues() for r in queue}
        model = self._turns.next(waiting | {variant_of(r) for r in self.running})
        if model is None:
            return held
        self._hidden = [r for r in self.running if variant_of(r) != model]
        self.running = [r for r in self.running if variant_of(r) == model]
        for name in MAX_RUNNING:  # who is hidden keeps a place in the model runner
            if hasattr(self, name):
                setattr(self, name, getattr(self, name) - len(self._hidden))
        for queue in self._queues():
            held.append(_hold_back(queue, {r.request_id for r in queue if variant_of(r) == model}))
        return held


class AsyncTurns(_OneModelAStep, AsyncVariantScheduler):
    pass


class SyncTurns(_OneModelAStep, SyncVariantScheduler):
    pass


def make_scheduler(*, vllm_config: Any, **others: Any) -> Any:
    """The class that `scheduler_cls` names."""
    asynchronous = vllm_config.scheduler_config.async_scheduling
    return (AsyncTurns if asynchronous else SyncTurns)(vllm_config=vllm_config, **others)
