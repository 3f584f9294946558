"""Which of the baseline's models runs next. Pure."""

from __future__ import annotations


class Turns:
    """Round robin over models with something to do, `quantum` steps each."""

    def __init__(self, quantum: int) -> None:
        self._quantum = quantum
        self._left = 0
        self._model = 0

    def next(self, runnable: set[int]) -> int | None:
        """The model of the next step: the same for `quantum` steps, then the next one that can run."""
        if not runnable:
            return None
        if self._model not in runnable or self._left == 0:
            later = [model for model in sorted(runnable) if model > self._model]
            self._model, self._left = (later or sorted(runnable))[0], self._quantum
        self._left -= 1
        return self._model

    def end(self) -> None:
        """It had nothing to do after all."""
        self._left = 0
