"""The step models of each base, kept up to date with the records, for the gateway's routers."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from functools import partial

from controlplane.planning.step_models import Memo, StepModels, step_models
from controlplane.settings import Settings
from controlplane.state.repository import State
from placement.types import Inventory

log = logging.getLogger(__name__)

# Records may change many times a second; step models rarely change with them.
EVERY_S = 1.0
# While groups lack a model and a new search finds none, the pause doubles up to this.
LONGEST_EVERY_S = 30.0
# Pause between two samples, which are computed in Python: requests on the gateway's loop go first.
PAUSE_S = 0.002


@dataclass
class _Base:
    memo: Memo = field(default_factory=lambda: Memo(partial(time.sleep, PAUSE_S)))
    models: StepModels | None = None
    revision: int | None = None
    began_s: float = float("-inf")
    every_s: float = field(default_factory=lambda: EVERY_S)
    task: asyncio.Task[None] | None = None


class StepModelBook:
    """The step models of each base.

    `of(base)` returns the known models at once. While calls come, a thread computes newer models. The same
    object means that nothing changed. `keep_telling` calls a function with the models.
    """

    def __init__(
        self,
        settings: Settings,
        state: Callable[[], State | None],
        inventory: Callable[[], Awaitable[Inventory]],
    ) -> None:
        """`state` returns the newest records that the gateway has read."""
        self._settings = settings
        self._state = state
        self._inventory = inventory
        self._bases: dict[str, _Base] = {}

    def of(self, base: str) -> StepModels | None:
        """The newest known models; None: none yet."""
        mine, state = self._bases.setdefault(base, _Base()), self._state()
        if state is not None and state.revision != mine.revision and _may_begin(mine):
            mine.began_s = time.monotonic()
            mine.task = asyncio.get_running_loop().create_task(self._renew(base, mine, state))
        return mine.models

    async def keep_telling(
        self, bases: Callable[[], Iterable[str]], learn: Callable[[str, StepModels], None]
    ) -> None:
        """Call `learn` with the known models of each of these bases, repeatedly, until cancelled.
        Unchanged models are the same object."""
        while True:
            for base in tuple(bases()):
                if (models := self.of(base)) is not None:
                    learn(base, models)
            await asyncio.sleep(EVERY_S)

    async def _renew(self, base: str, mine: _Base, state: State) -> None:
        try:
            inventory = await self._inventory()
            found = await asyncio.to_thread(
                step_models, state, inventory, self._settings, base, memo=mine.memo
            )
        except Exception:  # routing continues with the known models, or without any
            log.exception("the step models of %s could not be made; the gateway tries again", base)
            return
        if found is None or not found.is_same(mine.models):
            mine.models = found
        if _is_whole(found, state, base):
            mine.revision, mine.every_s = state.revision, EVERY_S
        else:
            mine.every_s = min(2 * mine.every_s, LONGEST_EVERY_S)


def _may_begin(mine: _Base) -> bool:
    runs = mine.task is not None and not mine.task.done()
    return not runs and time.monotonic() - mine.began_s >= mine.every_s


def _is_whole(found: StepModels | None, state: State, base: str) -> bool:
    """Tell whether each serving group has a model. Devices that did not report yet will do so later."""
    deployment = state.deployments.get(base)
    groups = deployment.record.serving_ids() if deployment else ()
    return set(groups) <= (found.model_of_group.keys() if found else set())
