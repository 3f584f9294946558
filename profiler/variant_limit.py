"""How many variants should run at once: DeltaZip's N, chosen from a short profile (its section 5.4). Pure.

With a small N a batch holds few variants, each with many requests, and other variants wait long. With a large
N every variant has few rows, all its weights must be read, and fewer requests share them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

# A short profile cannot distinguish throughputs this close to the best.
TOLERANCE = 0.03


@dataclass(frozen=True)
class SlotMeasurement:
    """A measurement with at most `limit` variants at once.

    `ttft_s` is the median of `requests`; a request without a token when the burst ended counts with its wait.
    """

    limit: int
    tokens_per_s: float
    ttft_s: float
    requests: int = 0


def candidate_limits(slots: int, variants: int) -> tuple[int, ...]:
    """The N to measure: powers of two below the most variants that can run, and this number. Raises
    ValueError."""
    if slots < 1 or variants < 1:
        raise ValueError(f"expected at least one slot and one variant, got {slots} and {variants}")
    most = min(slots, variants)
    powers = [1 << i for i in range(most.bit_length()) if 1 << i < most]
    return (*powers, most)


def choose_limit(
    measurements: Sequence[SlotMeasurement], max_ttft_s: float | None = None, tolerance: float = TOLERANCE
) -> int:
    """The N with the highest throughput among those within `max_ttft_s`.

    Among those within `tolerance` (a share) of the highest throughput, the one with the shortest TTFT is
    chosen; among equals the smallest. If no N is within `max_ttft_s`, the one with the shortest TTFT. Raises
    ValueError without measurements.
    """
    if not measurements:
        raise ValueError("no N was measured; profile at least one")
    within = [m for m in measurements if max_ttft_s is None or m.ttft_s <= max_ttft_s]
    if not within:
        return min(measurements, key=lambda m: (m.ttft_s, m.limit)).limit
    best = max(m.tokens_per_s for m in within)
    good = [m for m in within if m.tokens_per_s >= best * (1 - tolerance)]
    return min(good, key=lambda m: (m.ttft_s, m.limit)).limit
