"""What a decision is: a placement, or which constraint binds and what would do."""

from __future__ import annotations

from dataclasses import dataclass

from placement.types import Constraint, Placement, Relaxation


@dataclass(frozen=True)
class NotPlaced:
    """`binding` is the constraint whose removal would help first; `relaxations` begin with the nearest.

    Any one of them suffices, or, where none does alone, all `together`.
    """

    deployment: str
    binding: Constraint
    reason: str
    relaxations: tuple[Relaxation, ...] = ()
    together: bool = False


Outcome = Placement | NotPlaced
