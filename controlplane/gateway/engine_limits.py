"""How long a gateway waits for an engine."""

from __future__ import annotations

from dataclasses import dataclass

from controlplane import errors
from controlplane.traffic.worker_health import HealthRules

# Time between two looks at the workers of a base.
LOOK_S = 0.5


@dataclass(frozen=True)
class EngineLimits:
    """Limits of a stream: `first_byte_s` from when the engine got the request, `next_byte_s` between pieces.
    An engine that reported its load and is silent for `silent_s` gets no requests while another one does. Its
    unfinished answers are cut after `silent_cut_s`.
    """

    first_byte_s: float = 300.0
    next_byte_s: float = 120.0
    silent_s: float = 3.0
    silent_cut_s: float = 30.0

    @property
    def rules(self) -> HealthRules:
        return HealthRules(quiet=max(1, round(self.silent_s / LOOK_S)))


def no_byte(base: str, is_first: bool, limit_s: float) -> errors.Cut:
    what = "begun to answer" if is_first else "continued its answer"
    return errors.Cut(f"the engine of '{base}' has not {what} within {limit_s:g} s; try again")


def no_sign(base: str, limit_s: float) -> errors.Cut:
    return errors.Cut(f"the engine of '{base}' has not responded for {limit_s:g} s; try again")
