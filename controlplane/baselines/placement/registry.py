"""Placement policies by name."""

from __future__ import annotations

from enum import StrEnum

from controlplane.baselines.placement.maveriq import THETA, Maveriq, Selection
from placement.solver.policies.base import Policy
from placement.solver.policies.joint import Joint


class PolicyName(StrEnum):
    OSTINATO = "ostinato"
    MAVERIQ = "maveriq"  # hybrid: the paper's choice
    PACKING = "packing"
    LEAST_LOADED = "least-loaded"


def policy(name: PolicyName, theta: float = THETA, *, uneven: bool = True) -> Policy:
    """The policy of this name. `theta` and `uneven` are settings of the paper's policies."""
    match name:
        case PolicyName.OSTINATO:
            return Joint()
        case PolicyName.MAVERIQ:
            return Maveriq(Selection.HYBRID, theta, uneven)
        case PolicyName.PACKING:
            return Maveriq(Selection.PACKING, theta, uneven)
        case PolicyName.LEAST_LOADED:
            return Maveriq(Selection.LEAST_LOADED, theta, uneven)
