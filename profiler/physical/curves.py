"""The time of one engine step of `n` hidden layers, as a fit to measured steps.

A step takes `rest(x) + n (layer(x) + pair_s q)`: what does not depend on depth, and per layer its linear
parts and its attention. `x` is the step's work (sequences that decode, or prompt tokens), `q` the pairs of
tokens that attend to each other; `layer` and `rest` rise along straight lines between the measured `x`,
never fall, and go on along the last line beyond them. That is MaverIQ's equations 4 and 5 with the batch
(its equation 6, which errs by up to 84% because it is one line through two small batches) and the context
put inside.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.optimize import nnls

Floats = npt.NDArray[np.float64]
PRIOR_WEIGHT = 0.02  # of the prior against one measurement
PAIRS, PAIRS_WEIGHT = 4096, 0.1  # where contexts were short, noise must not decide about those of this length


@dataclass(frozen=True)
class Step:
    """One measured step: its work, its pairs of tokens, the hidden layers it went through, its seconds."""

    work: float
    pairs: float
    layers: int
    seconds: float


@dataclass(frozen=True)
class Line:
    """Straight lines through (xs, ys); constant before the first, along the last line beyond the end."""

    xs: tuple[float, ...]
    ys: tuple[float, ...]

    def at(self, x: float) -> float:
        xs, ys = self.xs, self.ys
        if x <= xs[0] or len(xs) == 1:
            return ys[0]
        i = min(bisect_right(xs, x), len(xs) - 1)
        return ys[i - 1] + (ys[i] - ys[i - 1]) * (x - xs[i - 1]) / (xs[i] - xs[i - 1])


@dataclass(frozen=True)
class StepTime:
    """Seconds. `error`: root mean square of the fit's relative errors. `widest`: the largest work seen."""

    rest: Line
    layer: Line
    pair_s: float
    error: float

    @property
    def widest(self) -> float:
        return self.rest.xs[-1]

    def rest_s(self, work: float) -> float:
        return self.rest.at(work)

    def layers_s(self, layers: float, work: float, pairs: float) -> float:
        return layers * (self.layer.at(work) + self.pair_s * pairs)

    def scaled(self, factor: float) -> StepTime:
        def times(line: Line) -> Line:
            return Line(line.xs, tuple(y * factor for y in line.ys))

        return StepTime(times(self.rest), times(self.layer), self.pair_s * factor, self.error)


def fit(steps: Sequence[Step], rest_to_layer: float, pair_to_layer: float | None = None) -> StepTime:
    """The step times nearest to what was measured, in relative terms (non-negative least squares).

    Where depths do not tell apart what a layer takes and what the rest does, `rest_to_layer` (the ratio
    of the bytes or operations of the two) decides; where contexts were too short to tell what a pair takes,
    `pair_to_layer` (its bytes over those of a layer at the least work). Raises ValueError without a step.
    """
    if not steps:
        raise ValueError("expected at least one measured step")
    knots = tuple(sorted({step.work for step in steps}))
    pair_unit = max(1.0, *(step.pairs * step.layers for step in steps))
    matrix = np.array([_row(step, knots, pair_unit) for step in steps])
    scale = 1 / np.array([step.seconds for step in steps])
    prior = _prior(len(knots), rest_to_layer) / np.mean(1 / scale) * PRIOR_WEIGHT
    if pair_to_layer is not None:
        most = max(step.layers for step in steps) * PAIRS_WEIGHT * PAIRS / np.mean(1 / scale)
        prior = np.vstack([prior, most * _pair_prior(len(knots), pair_to_layer, pair_unit)])
    everything = np.vstack([matrix * scale[:, None], prior])
    found, _ = nnls(everything, np.concatenate([np.ones(len(steps)), np.zeros(len(prior))]))
    errors = matrix @ found * scale - 1
    rest, layer, pair = np.split(found, [len(knots), 2 * len(knots)])
    return StepTime(
        Line(knots, tuple(np.cumsum(rest).tolist())),
        Line(knots, tuple(np.cumsum(layer).tolist())),
        float(pair[0] / pair_unit),
        float(np.sqrt(np.mean(errors**2))),
    )


def _row(step: Step, knots: Sequence[float], pair_unit: float) -> Floats:
    """Coefficients of the rises of `rest`, those of `layer`, and the time of a pair: rises that are not
    negative make lines that do not fall."""
    reached = np.array([step.work >= knot for knot in knots], dtype=np.float64)
    return np.concatenate([reached, step.layers * reached, [step.pairs * step.layers / pair_unit]])


def _pair_prior(knots: int, pair_to_layer: float, pair_unit: float) -> Floats:
    """pair = ratio x layer, at the first knot."""
    row = np.zeros((1, 2 * knots + 1))
    row[0, knots], row[0, -1] = -pair_to_layer, 1 / pair_unit
    return row


def _prior(knots: int, rest_to_layer: float) -> Floats:
    """rest = ratio x layer, at every knot."""
    cumulative = np.tril(np.ones((knots, knots)))
    return np.hstack([cumulative, -rest_to_layer * cumulative, np.zeros((knots, 1))])
