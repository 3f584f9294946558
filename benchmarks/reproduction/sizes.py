"""How much of a figure is computed; a rehearsal takes little."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Size:
    """`shares` of Azure's requests (MaverIQ's rate scales), highest first; `models` at most so many are
    deployed; `rates` (requests a second) and `horizon_s` of DeltaZip's figures, `promise_rates` of those at
    which a promise may be kept."""

    shares: tuple[float, ...] = (0.4, 0.3, 0.2, 0.1)
    seeds: int = 3
    models: int = 21
    rates: tuple[float, ...] = (0.5, 1.0, 2.0, 4.0)
    horizon_s: float = 300.0
    promise_rates: tuple[float, ...] = (0.25, 0.5, 0.75, 1, 1.25, 1.5, 2, 2.5, 3, 4, 5, 6, 7, 8, 9, 10, 12)
