"""A fine-tune to be compressed on a node, and how. Plain data: stored, sent to a task, read by a process."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

BUNDLED = Path(__file__).parent / "calibration" / "default.txt"
ROWS, TOKENS = 128, 2048  # the default calibration: the number of texts, and the tokens at which each is cut


@dataclass(frozen=True)
class Recipe:
    """How a fine-tune becomes a delta of its base. None, or "": the method's default.

    `method` is a name of `choose.MethodName`. `auto` tries several, and takes the smallest whose loss on the
    task file `evaluation` is at most `max_loss`, in percent (workers.compression.quality). `bits`, `ratio`,
    `group_size` and `max_widths` are the method's options. `calibration` is a file of texts (ours, if empty);
    `rows` rows of `tokens` tokens of it are run.
    With a method other than `auto`, `evaluation` only measures. `device` is "auto", "cpu" or "gpu".
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
        """The options that were given, by their names here."""
        defaults = Recipe(self.method)
        named = {f.name: getattr(self, f.name) for f in fields(self)}
        return {k: v for k, v in named.items() if k == "method" or v != getattr(defaults, k)}


@dataclass(frozen=True)
class CompressRequest:
    """Compress the checkpoint folder `tuned` against `base` into `folder`, where a killed compression
    continues.

    `device` is torch's name ("cpu", "cuda"), on `gpus` (indices) if given. `holder` is on the command line of
    its process: the process's memory counts as the holder's. `memory_bytes` were reserved; 0: none.
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
        """The delta's folder; it exists once it is complete."""
        return self.folder / "delta"
