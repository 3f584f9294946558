"""The only interface between a worker and the engine that generates tokens."""

from __future__ import annotations

from typing import Any, Protocol

from workers.asgi import AsgiApp, Message
from workers.engine.step_observer import StepObserver
from workers.messages import EngineResidency, RankReport, VariantRef


class Engine(Protocol):
    """An OpenAI application, and the variants that it can serve in addition to its base."""

    @property
    def app(self) -> AsgiApp: ...

    @property
    def version(self) -> str: ...

    @property
    def ranks(self) -> tuple[RankReport, ...]:
        """The memory that each rank takes on its device, measured when the engine was ready."""
        ...

    @property
    def observer(self) -> StepObserver:
        """The engine's step times, updated continuously."""
        ...

    async def answer(self, variant: VariantRef, scope: Message, receive: Any, send: Any) -> None:
        """Answer like `app`, for a request of this variant and of no other variant with the same name."""
        ...

    def variants(self) -> tuple[str, ...]:
        """The names of the loaded variants."""
        ...

    async def ensure_variant(self, variant: VariantRef) -> None:
        """Load `variant` unless the same uid is already loaded.

        Raises CheckpointError (a ValueError) if its files are invalid, ValueError if it does not fit, and
        LoadFailed if another attempt may succeed.
        """
        ...

    async def load_failure(self, variant: VariantRef) -> Exception | None:
        """The load error behind a request of `variant` that just failed; None if there is none, or it is
        unknown.
        """
        ...

    async def forget_variant(self, variant: VariantRef) -> None: ...

    async def prefetch(self, variant: VariantRef) -> None:
        """Make every rank hold `variant` in host memory. Raises like `ensure_variant`."""
        ...

    async def residency(self) -> EngineResidency:
        """Where every variant is now, and why it is not ready. Raises TimeoutError."""
        ...

    async def limit_variants(self, limit: int) -> int:
        """Run at most `limit` variants at once from now on; returns the new limit, 1 to the number of
        slots.
        """
        ...

    def answer_at_once(self, marker: str) -> None:
        """Answer requests whose id contains `marker` with one token, without generating it; "" stops this."""
        ...

    @property
    def failed(self) -> bool:
        """Whether the engine can no longer answer any request."""
        ...

    async def check_health(self) -> None:
        """Raises if the engine can no longer answer."""
        ...

    def close(self) -> None: ...
