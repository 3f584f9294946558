"""A fine-tune to be compressed on a node, and how. Plain data: stored, sent to a task, read by a process."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

BUNDLED = Path(__file__).parent / "calibration" / "default.txt"
ROWS, TOKENS = 128, 2048  # of calibration, if nobody says: as many texts, each cut at so many tokens


@dataclass(frozen=True)
class Recipe:
    """How a fine-tune becomes a delta of its base. None, or "": what the method does by itself.

    `method` is a name of `choose.MethodName`; `auto` tries several for the smallest whose loss on the task
    file `evaluation` is at most `max_loss`, in percent (workers.compression.quality). `bits`, `ratio`,
    `group_size` and `max_widths` are those that the method takes. `calibration` is a file of texts (ours,
    if empty), of which `rows` of `tokens` tokens are run.
    `evaluation` with another method than `auto` only measures. `device` is "auto", "cpu" or "gpu".
    """

    method: str
    bits: int | None = None
    ratio: float | None = None
    group_size: int | None = None
    max_widths: int | None = None
    calibration: str = ""
    rows: int | None = None
    tokens: int | None = None
    evaluation: str = ""
    max_loss: float | None = None
    lossless: bool = False
    device: str = "auto"

    def given(self) -> dict[str, Any]:
        """The options that were named, by their names here."""
        defaults = Recipe(self.method)
        named = {f.name: getattr(self, f.name) for f in fields(self)}
        return {k: v for k, v in named.items() if k == "method" or v != getattr(defaults, k)}


@dataclass(frozen=True)
class CompressRequest:
    """Compress the checkpoint folder `tuned` against `base` into `folder`, where a killed one goes on.

    `device` is torch's name ("cpu", "cuda"), of `gpus` (indices) where those are named. `holder` is on the
    command line of its process: that memory is the holder's. `memory_bytes` were set aside; 0: none were.
    """

    base: Path
    tuned: Path
    folder: Path
    recipe: Recipe
    device: str = "cpu"
    gpus: tuple[int, ...] = ()
    holder: str = ""
    memory_bytes: int = 0

    @property
    def artifact(self) -> Path:
        """The delta's folder, there once it is whole."""
        return self.folder / "delta"
