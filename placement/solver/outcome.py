"""The result of a decision: a placement, or the binding constraint and sufficient relaxations."""

from __future__ import annotations

from dataclasses import dataclass

from placement.types import Constraint, Placement, Relaxation


@dataclass(frozen=True)
class NotPlaced:
    """`binding` is the constraint whose removal helps first; `relaxations` begin with the nearest.

    Each of them suffices alone, or, with `together`, all of them are needed.
    """

    deployment: str
    binding: Constraint
    reason: str
    relaxations: tuple[Relaxation, ...] = ()
    together: bool = False


Outcome = Placement | NotPlaced
