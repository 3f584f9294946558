"""The one interface between a worker and what generates tokens."""

from __future__ import annotations

from typing import Any, Protocol

from workers.asgi import AsgiApp, Message
from workers.engine.step_observer import StepObserver
from workers.messages import EngineResidency, RankReport, VariantRef


class Engine(Protocol):
    """An OpenAI application plus the variants it can serve beside its base."""

    @property
    def app(self) -> AsgiApp: ...

    @property
    def version(self) -> str: ...

    @property
    def ranks(self) -> tuple[RankReport, ...]:
        """What each rank takes of its device, measured when the engine was ready."""
        ...

    @property
    def observer(self) -> StepObserver:
        """What its steps take, as they are made."""
        ...

    async def answer(self, variant: VariantRef, scope: Message, receive: Any, send: Any) -> None:
        """As `app` does, for a request of this variant and of no other that has its name."""
        ...

    def variants(self) -> tuple[str, ...]:
        """Names of the variants loaded now."""
        ...

    async def ensure_variant(self, variant: VariantRef) -> None:
        """Load `variant` unless this very one (same uid) is loaded.

        Raises CheckpointError (a ValueError) when its files are not sound, ValueError if it does not fit, and
        LoadFailed when another attempt may do.
        """
        ...

    async def load_failure(self, variant: VariantRef) -> Exception | None:
        """Why a request of `variant` that failed just now found it not loaded; None: that was not the reason,
        or it is not known."""
        ...

    async def forget_variant(self, variant: VariantRef) -> None: ...

    async def prefetch(self, variant: VariantRef) -> None:
        """Have every rank hold `variant` in host memory. Raises as `ensure_variant` does."""
        ...

    async def residency(self) -> EngineResidency:
        """Where every variant is now, and why one is not ready. Raises TimeoutError."""
        ...

    async def limit_variants(self, limit: int) -> int:
        """Run at most `limit` variants at once from now on; returns what it is then, 1 to the slots."""
        ...

    def answer_at_once(self, marker: str) -> None:
        """Answer requests whose id holds `marker` with one token, and without generating it; "": none."""
        ...

    @property
    def failed(self) -> bool:
        """Whether it will answer no request any more."""
        ...

    async def check_health(self) -> None:
        """Raises when the engine cannot answer any more."""
        ...

    def close(self) -> None: ...
