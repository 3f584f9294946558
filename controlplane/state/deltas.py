"""A variant that is made of a fine-tune here: how, how far that is, and what came out."""

from __future__ import annotations

from dataclasses import dataclass, replace

from workers.compression.lines import Artifact, Progress, Quality
from workers.compression.recipe import Recipe

__all__ = ["Artifact", "Delta", "Quality", "Recipe", "at", "placed", "queued"]


@dataclass(frozen=True)
class Delta:
    """A fine-tune and its way to a delta. `tuned` is its folder, known once it was looked at.

    It is compressed on `node` (empty: it waits, for `doing`). `share` of the work (0..1) is done,
    `left_s` seconds are left, as far as can be said. `attempts` were cut off in a row without getting any
    further. Once there is an `artifact`, that is what the model's `adapter` names. Its calibration is of
    `text_bytes`; None: a record of before does not say.
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
    """The delta, begun on a node: that is an attempt until it gets further."""
    return replace(delta, node=node, attempts=delta.attempts + 1, doing="starting", left_s=None)


def queued(delta: Delta, reason: str) -> Delta:
    """The delta, waiting for its turn, or to be begun again after it was cut off."""
    return replace(delta, node="", doing=reason, left_s=None)


def at(delta: Delta, progress: Progress) -> Delta:
    """The delta that far. Only what goes beyond the farthest so far makes earlier attempts count no more."""
    further = progress.share > delta.share
    return replace(
        delta,
        share=max(delta.share, progress.share),
        doing=progress.doing,
        left_s=progress.left_s,
        attempts=0 if further else delta.attempts,
    )
