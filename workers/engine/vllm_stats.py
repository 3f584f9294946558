"""vLLM's reports of its steps, for a `StepObserver`: a stat logger, as AsyncLLM makes one for each core.

vLLM calls these objects unstable. So they are read field by field, and fields that a version lacks are
skipped: 0.32 counts deferred requests separately from waiting ones, and 0.26 has them in one figure.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from workers.engine.step_observer import StepObserver

log = logging.getLogger(__name__)


class StatLogger:
    """Has the methods of vLLM's StatLoggerBase, which it cannot inherit without importing vLLM."""

    def __init__(self, observer: StepObserver) -> None:
        self._observer = observer
        self._failed = False

    def record(self, scheduler_stats: Any = None, iteration_stats: Any = None, *_: Any, **__: Any) -> None:
        """Read the figures after each step. Errors in them must not end vLLM's loop, which calls this."""
        try:
            if scheduler_stats is not None:
                _requests(self._observer, scheduler_stats)
            if iteration_stats is not None:
                _step(self._observer, iteration_stats)
        except Exception:
            if not self._failed:
                log.exception("vLLM's figures of a step cannot be read; this warning appears only once")
            self._failed = True

    def log_engine_initialized(self) -> None:
        """Does nothing."""

    def log(self) -> None:
        """Does nothing: vLLM's own loggers do."""

    def record_sleep_state(self, *_: Any, **__: Any) -> None:
        """Does nothing: engines are not put to sleep."""


def stat_loggers(observer: StepObserver) -> list[Callable[..., Any]]:
    """The value of AsyncLLM's argument of this name, in addition to vLLM's own loggers."""

    def make(*_: Any, **__: Any) -> StatLogger:
        return StatLogger(observer)

    return [make]


def _requests(observer: StepObserver, stats: Any) -> None:
    waiting = getattr(stats, "num_waiting_reqs", 0) + getattr(stats, "num_skipped_waiting_reqs", 0)
    observer.requests(getattr(stats, "num_running_reqs", 0), waiting, getattr(stats, "kv_cache_usage", 0.0))


def _step(observer: StepObserver, stats: Any) -> None:
    observer.step(getattr(stats, "inter_token_latencies_iter", ()))
    for request in getattr(stats, "finished_requests", ()):
        tokens = getattr(request, "num_prompt_tokens", 0) - getattr(request, "num_cached_tokens", 0)
        observer.prefill(tokens, getattr(request, "prefill_time", 0.0))
