"""The time of one engine step of `n` hidden layers, as a fit to measured steps.

A step takes `rest(x) + n (layer(x) + pair_s q)`: a part that does not depend on depth, and per layer its
linear parts and its attention. `x` is the step's work (sequences that decode, or prompt tokens); `q` is the
number of pairs of tokens that attend to each other. `layer` and `rest` are straight lines between the
measured `x`; they never fall, and beyond the last `x` the last line continues.

A burst of prefill steps takes `once` more before the first step: the host's part, which later steps hide. The
steps after the first take `later` more for each token and layer, because a busy GPU lowers its clock. In such
a step each sequence that also decodes takes `along` more, and each cached token that it reads `along_pair`.

These are MaverIQ's equations 4 and 5 with the batch and the context inside. (Its equation 6 for the batch
errs by up to 84%, because it is one line through two small batches.)
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import scipy  # which imports a part of itself when that is first used

Floats = npt.NDArray[np.float64]
Prior = tuple[Floats, Floats | float]  # rows of a least squares problem, and their target values
PRIOR_WEIGHT = 0.02  # of a prior against one measurement
CERTAIN = 10.0  # weight of a prior about which the measurements say nothing
OTHERS = ("pair_s", "once_s", "later_s", "along_s", "along_pair_s")  # parameters of StepTime without lines
PAIRS, PAIRS_WEIGHT = 4096, 0.1  # if measured contexts were short, noise must not decide about this length


@dataclass(frozen=True)
class Step:
    """One measured step: its work, its pairs of tokens, its number of hidden layers, its seconds."""

    work: float
    pairs: float
    layers: int
    seconds: float


@dataclass(frozen=True)
class Part:
    """Equal steps of a burst: in each, `along` sequences decode and read `along_pairs` tokens. `later`: how
    many of them come after the burst's first step."""

    work: float
    pairs: float
    count: float = 1.0
    later: float = 0.0
    along: float = 0.0
    along_pairs: float = 0.0


@dataclass(frozen=True)
class Burst:
    """Consecutive steps on an idle engine, and their total seconds."""

    parts: tuple[Part, ...]
    layers: int
    seconds: float


@dataclass(frozen=True)
class Line:
    """Straight lines through (xs, ys); constant before the first point, the last line beyond the last
    point."""

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
    """Seconds. `error`: root mean square of the fit's relative errors. `widest`: the largest measured
    work."""

    rest: Line
    layer: Line
    pair_s: float
    error: float
    once_s: float = 0.0
    later_s: float = 0.0
    along_s: float = 0.0
    along_pair_s: float = 0.0

    @property
    def widest(self) -> float:
        return self.rest.xs[-1]

    @property
    def later_to_token(self) -> float:
        """The additional time of a later token, divided by its own time, in the largest step."""
        layer_s = self.layer.ys[-1]
        return self.later_s * self.widest / layer_s if layer_s else 0.0

    def rest_s(self, work: float) -> float:
        return self.rest.at(work)

    def layers_s(self, layers: float, work: float, pairs: float) -> float:
        return layers * (self.layer.at(work) + self.pair_s * pairs)


def fit(steps: Sequence[Step], beside: float | Line, pair_to_layer: float | None = None) -> StepTime:
    """The step times that fit the measurements best, by relative errors (non-negative least squares).

    If depths do not separate a layer's time from the rest, the second argument decides: the ratio of the rest
    to a layer (by bytes or operations), or the rest as it was measured elsewhere. If contexts were too short
    to show a pair's time, `pair_to_layer` decides (a pair's bytes over a layer's at the least work). Raises
    ValueError without a step.
    """
    bursts = [Burst((Part(s.work, s.pairs),), s.layers, s.seconds) for s in steps]
    problem = _Problem.of(bursts)
    # A ratio of bytes is a guess; a measurement elsewhere is not.
    priors = [problem.rest_prior(beside, isinstance(beside, Line) and not problem.is_of_depths)]
    if pair_to_layer is not None:
        priors.append(problem.pair_prior(pair_to_layer))
    return problem.solve(priors, unused=OTHERS[1:])


def fit_bursts(
    bursts: Sequence[Burst],
    beside: float | Line,
    decode_pair_s: float,
    pair_to_token: float = 0.0,
    later_to_token: float | None = None,
) -> StepTime:
    """As `fit`, from bursts of one or several prefill steps. Priors hold unless the bursts contradict them:
    reading a cached token takes `decode_pair_s`, and a pair takes `pair_to_token` times a layer's time per
    token of the largest step (the ratio of their operations). `later_to_token` is the additional time of
    later steps, in the same unit: one depth cannot separate it from `once_s`. Raises ValueError without a
    burst."""
    problem = _Problem.of(bursts)
    # Otherwise the prior on a pair's share of a layer would turn the rest into layer time.
    is_certain = not problem.is_of_depths
    several = any(len(burst.parts) > 1 or burst.parts[0].count > 1 for burst in bursts)
    priors = [
        problem.rest_prior(beside, is_certain),
        problem.token_prior(pair_to_token),
        *problem.burst_priors(decode_pair_s),
        *([problem.later_prior(later_to_token)] if later_to_token else []),
    ]
    # In single steps, the time that comes once is a part of the rest.
    never_later = ("later_s",) if later_to_token == 0.0 else ()
    return problem.solve(priors, unused=never_later if several else ("once_s", "later_s"))


@dataclass(frozen=True)
class _Problem:
    """A least squares problem. The unknowns are the rises of `rest` and `layer` at the knots (non-negative
    rises make lines that do not fall), and OTHERS; rows are relative to the measured seconds."""

    knots: tuple[float, ...]
    matrix: Floats
    seconds: Floats
    units: Floats  # of OTHERS: they bring columns to similar sizes

    @classmethod
    def of(cls, bursts: Sequence[Burst]) -> _Problem:
        if not bursts:
            raise ValueError("expected at least one measured step")
        knots = _knots(bursts)
        rows = np.array([_row(burst, knots) for burst in bursts])
        units = np.maximum(rows[:, 2 * len(knots) :].max(axis=0), 1.0)
        rows[:, 2 * len(knots) :] /= units
        return cls(knots, rows, np.array([burst.seconds for burst in bursts]), units)

    @property
    def is_of_depths(self) -> bool:
        """Whether depths differ: then the fit separates layers from the rest."""
        layers = self.matrix[:, len(self.knots)] / self.matrix[:, 0]
        return bool(np.ptp(layers) > 0.5)  # they are whole numbers, except for rounding

    def rest_prior(self, beside: float | Line, is_certain: bool = False) -> Prior:
        """A prior: at every knot the rest has this value, or this ratio to a layer."""
        weight = CERTAIN / self.seconds.min() if is_certain else PRIOR_WEIGHT / self.seconds.mean()
        ratio, known = (0.0, beside.at) if isinstance(beside, Line) else (beside, lambda work: 0.0)
        cumulative = np.tril(np.ones((len(self.knots), len(self.knots))))
        others = np.zeros((len(self.knots), len(OTHERS)))
        rows = np.hstack([cumulative, -ratio * cumulative, others])
        return rows * weight, np.array([known(knot) for knot in self.knots]) * weight

    def pair_prior(self, pair_to_layer: float) -> Prior:
        """pair = ratio x layer, at the first knot."""
        most_layers = self.matrix[:, len(self.knots)].max()
        weight = most_layers * PAIRS_WEIGHT * PAIRS / self.seconds.mean()
        row = self._weighed("pair_s", weight)
        row[0, len(self.knots)] = -weight * pair_to_layer
        return row, 0.0

    def token_prior(self, pair_to_token: float) -> Prior:
        """pair = ratio x layer / work, at the last knot."""
        weight, knots = self._most("pair_s"), len(self.knots)
        row = self._weighed("pair_s", weight)
        row[0, knots : 2 * knots] = -weight * pair_to_token / self.knots[-1]
        return row, 0.0

    def later_prior(self, later_to_token: float) -> Prior:
        """later = ratio x layer / work, at the last knot, for certain."""
        knots, last = len(self.knots), self.knots[-1]
        weight = CERTAIN * self.matrix[:, knots].max() * last / self.seconds.min()
        row = self._weighed("later_s", weight)
        row[0, knots : 2 * knots] = -weight * later_to_token / last
        return row, 0.0

    def burst_priors(self, decode_pair_s: float) -> list[Prior]:
        """Priors that nothing comes once, later or for sequences that also decode, and that these sequences'
        tokens take the same time as when all sequences decode."""
        expected = {"once_s": 0.0, "later_s": 0.0, "along_s": 0.0, "along_pair_s": decode_pair_s}
        weights = {name: self._most(name) for name in expected}
        return [(self._weighed(name, weights[name]), weights[name] * expected[name]) for name in expected]

    def _most(self, name: str) -> float:
        """A prior's weight on one of OTHERS: the more of it the bursts contain, the larger the weight."""
        return float(self.units[OTHERS.index(name)] / self.seconds.mean() * PRIOR_WEIGHT)

    def _weighed(self, name: str, weight: float) -> Floats:
        row, number = np.zeros((1, self.matrix.shape[1])), OTHERS.index(name)
        row[0, 2 * len(self.knots) + number] = weight / self.units[number]
        return row

    def solve(self, priors: Sequence[Prior], unused: Sequence[str] = ()) -> StepTime:
        rows = self.matrix / self.seconds[:, None]
        everything = np.vstack([rows, *(prior for prior, _ in priors)])
        wanted = [np.ones(len(rows)), *(np.broadcast_to(value, len(prior)) for prior, value in priors)]
        for name in unused:
            everything[:, 2 * len(self.knots) + OTHERS.index(name)] = 0.0
        solution, _ = scipy.optimize.nnls(everything, np.concatenate(wanted))
        rest, layer, others = np.split(solution, [len(self.knots), 2 * len(self.knots)])
        named = dict(zip(OTHERS, (others / self.units).tolist(), strict=True))
        return StepTime(
            Line(self.knots, tuple(np.cumsum(rest).tolist())),
            Line(self.knots, tuple(np.cumsum(layer).tolist())),
            error=float(np.sqrt(np.mean((rows @ solution - 1) ** 2))),
            **named,
        )


def _knots(bursts: Sequence[Burst]) -> tuple[float, ...]:
    """The work of single measured steps, and of the largest step."""
    alone = {burst.parts[0].work for burst in bursts if len(burst.parts) == 1 and burst.parts[0].count == 1}
    return tuple(sorted(alone | {max(part.work for burst in bursts for part in burst.parts)}))


def _row(burst: Burst, knots: Sequence[float]) -> Floats:
    """The burst's amount of each unknown."""

    def total(of: Callable[[Part], float]) -> float:
        return sum(part.count * of(part) for part in burst.parts)

    reached = np.sum([part.count * _reached(part.work, knots) for part in burst.parts], axis=0)
    pairs, along_pairs = total(lambda part: part.pairs), total(lambda part: part.along_pairs)
    later = sum(part.later * part.work for part in burst.parts)
    along = total(lambda part: part.along)
    others = [burst.layers * pairs, 1.0, burst.layers * later, along, burst.layers * along_pairs]
    return np.concatenate([reached, burst.layers * reached, others])


def _reached(work: float, knots: Sequence[float]) -> Floats:
    """A step's share of each knot's rise: all of it, a part if `work` lies between two knots, or none; beyond
    the last knot more than all."""
    reached = np.ones(len(knots))
    for i, (before, knot) in enumerate(itertools.pairwise(knots), 1):
        reached[i] = max(0.0, (work - before) / (knot - before))
        if i < len(knots) - 1:
            reached[i] = min(1.0, reached[i])
    return reached
