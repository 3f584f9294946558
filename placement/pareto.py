"""The Pareto-optimal plans: plans that no other plan dominates. Pure."""

from __future__ import annotations

from collections.abc import Sequence


def pareto(costs: Sequence[tuple[float, ...]]) -> tuple[bool, ...]:
    """For each plan's costs (all of one length, less is better), whether no other plan dominates it.

    A plan dominates another if it is nowhere more expensive and somewhere cheaper; of equal plans both stay.
    """
    return tuple(not any(_dominates(other, mine) for other in costs) for mine in costs)


def _dominates(other: tuple[float, ...], mine: tuple[float, ...]) -> bool:
    return other != mine and all(theirs <= ours for theirs, ours in zip(other, mine, strict=True))
