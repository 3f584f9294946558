"""The place of `scheduling.client.VariantClient` in an engine that serves its base alone."""

from __future__ import annotations

from typing import Any


class NoVariants:
    """No slots, no variants, and a reason for whoever asks for one."""

    async def prepare(self, uid: int, path: str) -> None:
        """Raises ValueError."""
        raise ValueError("it was started without slots for variants")

    async def forget(self, uid: int) -> None:
        """There is nothing to forget."""

    async def state(self, timeout_s: float = 0.0) -> dict[str, Any]:
        counts = dict.fromkeys(("slots", "limit", "skips", "preemptions", "blocked"), 0)
        return {**counts, "variants": []}

    async def limit(self, variants: int) -> int:
        return 0

    def close(self) -> None:
        """There is nothing to close."""
