"""How much of a figure is computed; a rehearsal takes little."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Size:
    """`shares` of Azure's requests (MaverIQ's rate scales), highest first; `models` at most so many are
    deployed; `rates` (requests a second) and `horizon_s` of DeltaZip's figures."""

    shares: tuple[float, ...] = (0.4, 0.3, 0.2, 0.1)
    seeds: int = 3
    models: int = 21
    rates: tuple[float, ...] = (0.5, 1.0, 2.0, 4.0)
    horizon_s: float = 300.0
