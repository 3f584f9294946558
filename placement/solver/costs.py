"""The cost and capacity of each group of GPUs as a stage of one shape, as arrays."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from placement.solver.groups import Groups
from placement.solver.memory import most_layers
from placement.solver.objective import limits_of
from placement.solver.plan import Estimator, Shape, StepRates
from placement.solver.request import Request
from placement.solver.view import Floats, Ints, View

SAFE = 1e-9  # relative; a stage that is always busy, except for rounding, still sustains the rate


@dataclass(frozen=True)
class Costs:
    """Per column: seconds (`StepRates`) including the slowdown, and the most layers by a stage's position."""

    prefill: Floats
    decode: Floats
    prefill_rest: Floats
    decode_rest: Floats
    decode_gap: Floats
    first: Ints
    middle: Ints
    last: Ints

    def caps(self, stage: int, pp: int) -> Ints:
        """The most layers of a stage. With one stage, `first` already counts as the last stage, too."""
        if stage == 0:
            return self.first
        return self.last if stage == pp - 1 else self.middle

    def most(self, pp: int) -> int:
        """An upper bound of the layers of a pipeline of `pp` stages."""
        ends = int(self.first.max()) + (int(self.last.max()) if pp > 1 else 0)
        return ends + max(0, pp - 2) * int(self.middle.max())


def costs_of(request: Request, shape: Shape, view: View, groups: Groups, estimator: Estimator) -> Costs:
    rates = _rates(shape, view, groups, estimator)
    prefill, decode, work, prefill_rest, decode_rest, work_rest, decode_gap, work_gap = (
        rates * groups.slowdown
    )
    pp, limits = shape.pp, limits_of(request, estimator)

    def most(stage: int) -> Ints:
        by_memory = most_layers(estimator.lines(shape, stage), groups.usable)
        caps = np.minimum(by_memory, request.model.layers - pp + 1)
        if request.rate_per_s > 0:
            busy = (1 - SAFE) / request.rate_per_s - (work_rest if stage == pp - 1 else work_gap)
            caps = np.minimum(caps, np.floor(busy / work))
        if limits.token_s < np.inf:  # all batches in flight take their turns on each stage
            turn = limits.token_s / estimator.groups(shape) - (decode_rest if stage == pp - 1 else decode_gap)
            caps = np.minimum(caps, np.floor(turn / decode))
        clipped: Ints = np.maximum(0, caps).astype(np.int64)
        return clipped

    last = most(pp - 1)
    middle = most(1) if pp > 2 else last  # a pipeline of two stages has no middle
    return Costs(prefill, decode, prefill_rest, decode_rest, decode_gap, most(0), middle, last)


def _rates(shape: Shape, view: View, groups: Groups, estimator: Estimator) -> Floats:
    """(8, groups): the `StepRates` of each group, without load."""
    rates = np.zeros((8, len(groups)))
    for number, link, columns in groups.kinds:
        rates[:, columns] = _row(estimator.rates(shape, view.types[number].name, link))
    return rates


def _row(rates: StepRates) -> Floats:
    return np.array(
        [
            [rates.prefill_layer_s],
            [rates.decode_layer_s],
            [rates.work_layer_s],
            [rates.prefill_rest_s],
            [rates.decode_rest_s],
            [rates.work_rest_s],
            [rates.decode_gap_s],
            [rates.work_gap_s],
        ]
    )
