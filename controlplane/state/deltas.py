"""A variant made here from a fine-tune: its recipe, its progress, and its result."""

from __future__ import annotations

from dataclasses import dataclass, replace

from workers.compression.lines import Artifact, Progress, Quality
from workers.compression.recipe import Recipe

__all__ = ["Artifact", "Delta", "Quality", "Recipe", "at", "placed", "queued"]


@dataclass(frozen=True)
class Delta:
    """A fine-tune on its way to a delta. `tuned` is its folder, known after it was inspected.

    It is compressed on `node` (empty: it waits, for `doing`). `share` of the work (0..1) is done, `left_s`
    seconds are left, if known. `attempts` in a row were cut off without progress. The model's `adapter` names
    the `artifact` once there is one. Its calibration uses `text_bytes` of text; None: an older record does
    not have it.
    """

    recipe: Recipe
    tuned: str = ""
    node: str = ""
    share: float = 0.0
    doing: str = ""
    left_s: float | None = None
    attempts: int = 0
    artifact: Artifact | None = None
    text_bytes: int | None = None


def placed(delta: Delta, node: str) -> Delta:
    """The delta, started on a node: this counts as an attempt until it makes progress."""
    return replace(delta, node=node, attempts=delta.attempts + 1, doing="starting", left_s=None)


def queued(delta: Delta, reason: str) -> Delta:
    """The delta, waiting for its turn, or for a restart after it was cut off."""
    return replace(delta, node="", doing=reason, left_s=None)


def at(delta: Delta, progress: Progress) -> Delta:
    """The delta with this progress. Only progress beyond the farthest point so far resets the attempts."""
    further = progress.share > delta.share
    return replace(
        delta,
        share=max(delta.share, progress.share),
        doing=progress.doing,
        left_s=progress.left_s,
        attempts=0 if further else delta.attempts,
    )
