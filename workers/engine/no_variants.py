"""Replaces `scheduling.client.VariantClient` in an engine that serves only its base."""

from __future__ import annotations

from typing import Any


class NoVariants:
    """A client without slots and variants; it refuses every variant with a reason."""

    async def prepare(self, uid: int, path: str) -> None:
        """Raises ValueError."""
        raise ValueError("the engine was started without slots for variants")

    async def forget(self, uid: int) -> None:
        """Does nothing: there are no variants."""

    async def state(self, timeout_s: float = 0.0) -> dict[str, Any]:
        counts = dict.fromkeys(("slots", "limit", "skips", "preemptions", "blocked"), 0)
        return {**counts, "variants": []}

    async def limit(self, variants: int) -> int:
        return 0

    def close(self) -> None:
        """Does nothing: there is nothing to close."""
