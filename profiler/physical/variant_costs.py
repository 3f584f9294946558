"""The cost of variants of each kind, from fingerprints measured with synthetic variants.

The time that variants add to a layer is the time of a load with variants, minus that of the same load
without, divided by the layers. For each kind it has five parts (`VariantCost`). They are fitted by
non-negative least squares on relative errors, with priors near the base's pace of reading and computing. If
a burst's prompts take several steps, each step counts with its own variants. For each set of kinds that was
measured in one batch, a factor relates their time together to the sum of their times.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import scipy  # which imports a part of itself when that is first used

from profiler.measurements import Point, Setting, Timing
from profiler.physical.calibration import Calibration, Cut, KindsTogether, VariantCost, VariantCosts
from profiler.physical.prefill import split_prefill
from profiler.physical.variants import (
    WHOLE,
    KindLoad,
    Share,
    VariantLoad,
    parts_of,
    prefill_share,
    variant_load,
)
from profiler.types import Workload
from profiler.variants.synthetic import synthetic_spec

PRIOR_WEIGHT = 0.005  # of the priors against one measurement
MAX_TOGETHER = 3.0  # times the sum, or a third of it: a larger deviation is a disturbance

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Seen:
    """One measured load, in seconds per layer: its amount of each part of `VariantCost`, how much longer it
    took than the base, and its whole time."""

    parts: tuple[float, ...]
    longer_s: float
    whole_s: float


def fit_variants(
    calibration: Calibration, mixed: Sequence[Timing], alone: Sequence[Timing]
) -> tuple[dict[str, VariantCosts], dict[frozenset[str], KindsTogether]]:
    """Costs by kind, and the factors of sets of kinds. A load counts if the base `alone` was measured in the
    same setting.

    From a load of one kind, the time of its engine's other kinds is subtracted, so the kind that was measured
    alone comes first. A load of another kind shows the cost of a kind's kernels when they are unused.
    """
    base = {(t.setting, t.point): t for t in alone}
    loads = [
        _Load.of(calibration, t, other) for t in mixed if (other := base.get(_without(t.setting, t.point)))
    ]
    costs: dict[str, VariantCosts] = {}
    for kind, own in _by_kind([load for load in loads if len(load.kinds) == 1]):
        decode = [_seen(calibration, load, kind, costs) for load in own]
        prefill = [_seen(calibration, load, kind, costs, fills=True) for load in own]
        asked = [load for load in own if kind in load.kinds]
        costs[kind] = VariantCosts(
            _fit(decode),
            _fit(prefill),
            max((load.mixed.point.batch for load in asked), default=1),
            max((of_kind.distinct for load in asked for of_kind in load.asked(kind)), default=1),
        )
    return costs, _together(calibration, [load for load in loads if len(load.kinds) > 1], costs)


@dataclass(frozen=True)
class _Load:
    """A load with variants, and the same load of the base alone. `steps`: the shares of the batch in the
    steps that fill its prompts, and the number of such steps."""

    mixed: Timing
    alone: Timing
    variants: VariantLoad
    steps: tuple[tuple[Share, float], ...]

    @classmethod
    def of(cls, calibration: Calibration, mixed: Timing, alone: Timing) -> _Load:
        point = mixed.point
        made = {variant: synthetic_spec(calibration.spec, variant) for variant in point.mix}
        mix = [made[variant] for variant in point.mix]
        whole = variant_load(calibration.spec, mix, point.batch, mixed.setting.launched)
        work = Workload(point.batch, point.input_tokens, mixed.output_tokens)
        steps = split_prefill(work, calibration.batched_tokens).steps
        shares = tuple((prefill_share(whole, step, point.input_tokens), step.count) for step in steps)
        return cls(mixed, alone, whole, shares)

    @property
    def kinds(self) -> set[str]:
        return {variant.kind for variant in self.mixed.point.mix[: self.mixed.point.batch]}

    @property
    def launched(self) -> set[str]:
        return self.kinds | set(self.mixed.setting.launched)

    def asked(self, kind: str) -> list[KindLoad]:
        return [of_kind for of_kind in self.variants.kinds if of_kind.kind == kind]

    def longer_s(self, *, fills: bool) -> float:
        """Additional seconds per layer."""
        mixed_s, alone_s = (t.ttft_last_s if fills else t.tpot_s for t in (self.mixed, self.alone))
        return (mixed_s - alone_s) / self.mixed.setting.layers

    def whole_s(self, *, fills: bool) -> float:
        return (self.mixed.ttft_last_s if fills else self.mixed.tpot_s) / self.mixed.setting.layers

    def parts(self, calibration: Calibration, of_kind: KindLoad, *, fills: bool) -> Floats:
        """The amounts of the cost's parts in a decode step, or in all steps that fill the prompts."""
        cut = Cut.of(self.mixed.setting)
        shares = self.steps if fills else ((WHOLE, 1.0),)
        each = [count * np.array(parts_of(calibration, cut, of_kind, share)) for share, count in shares]
        total: Floats = np.sum(each, axis=0)
        return total


def _by_kind(loads: Sequence[_Load]) -> Iterator[tuple[str, list[_Load]]]:
    """Each kind, with the loads in which only it and earlier kinds are launched."""
    fitted: set[str] = set()
    while ready := {next(iter(new)) for load in loads if len(new := load.launched - fitted) == 1}:
        kind = min(ready)
        fitted.add(kind)
        yield kind, [load for load in loads if kind in load.launched <= fitted]


def _without(setting: Setting, point: Point) -> tuple[Setting, Point]:
    return dataclasses.replace(setting, launched=()), Point(point.batch, point.input_tokens)


def _seen(
    calibration: Calibration,
    load: _Load,
    kind: str,
    known: Mapping[str, VariantCosts],
    fills: bool = False,
) -> Seen:
    """What `kind` takes in the load's decode step, or in its prefill; the other kinds are `known`."""
    longer_s, (own,) = load.longer_s(fills=fills), load.asked(kind)
    longer_s -= sum(
        _known_s(calibration, load, other, known, fills=fills)
        for other in load.variants.kinds
        if other.kind != kind
    )
    parts = load.parts(calibration, own, fills=fills)
    return Seen(tuple(parts.tolist()), max(0.0, longer_s), load.whole_s(fills=fills))


def _known_s(
    calibration: Calibration,
    load: _Load,
    of_kind: KindLoad,
    known: Mapping[str, VariantCosts],
    *,
    fills: bool,
) -> float:
    costs = known[of_kind.kind]
    figures = _figures(costs.prefill if fills else costs.decode)
    return float(load.parts(calibration, of_kind, fills=fills) @ figures)


def _figures(cost: VariantCost) -> Floats:
    return np.array([cost.per_module_s, cost.per_pair_s, cost.pace, cost.more_pace, cost.per_tile_s])


def _fit(seen: Sequence[Seen]) -> VariantCost:
    """Fit the cost. Errors are relative to the whole step, because whole steps repeat to a few percent."""
    rows = [np.array(step.parts) / step.whole_s for step in seen]
    modules, pairs, *_ = np.mean(rows, axis=0)
    # Pace is near one; if a load cannot separate both kinds of launches, each gets half of the time.
    priors = [
        [0.0, 0.0, PRIOR_WEIGHT, 0.0, 0.0],
        [PRIOR_WEIGHT * modules, -PRIOR_WEIGHT * pairs, 0.0, 0.0, 0.0],
    ]
    wanted = np.array([step.longer_s / step.whole_s for step in seen])
    targets = [*wanted, PRIOR_WEIGHT, 0.0]
    matrix = np.array([*rows, *priors])
    scale = np.maximum(np.abs(matrix).max(axis=0), 1e-30)  # columns differ by orders of magnitude
    solution, _ = scipy.optimize.nnls(matrix / scale, np.array(targets))
    figures = solution / scale
    # A part that no load has stays unknown; NNLS leaves it at zero.
    error = math.sqrt(float(np.mean((np.array(rows) @ figures - wanted) ** 2)))
    return dataclasses.replace(VariantCost(*figures.tolist()), error=error)


def _together(
    calibration: Calibration, loads: Sequence[_Load], known: Mapping[str, VariantCosts]
) -> dict[frozenset[str], KindsTogether]:
    """Factors by the kinds that are launched, for sets whose kinds are all known."""
    by_set: dict[frozenset[str], list[_Load]] = {}
    for load in loads:
        if load.launched <= known.keys():
            by_set.setdefault(load.variants.kind_names, []).append(load)
    return {kinds: _ratios(calibration, same, known) for kinds, same in by_set.items()}


def _ratios(
    calibration: Calibration, loads: Sequence[_Load], known: Mapping[str, VariantCosts]
) -> KindsTogether:
    (decode, decode_error), (prefill, prefill_error) = (
        _ratio(
            [
                (
                    sum(
                        _known_s(calibration, load, kind, known, fills=fills) for kind in load.variants.kinds
                    ),
                    load.longer_s(fills=fills),
                    load.whole_s(fills=fills),
                )
                for load in loads
            ]
        )
        for fills in (False, True)
    )
    return KindsTogether(decode, prefill, decode_error, prefill_error)


def _ratio(seen: Sequence[tuple[float, float, float]]) -> tuple[float, float]:
    """The factor for sums, and the remaining error relative to whole steps. `seen`: (the sum, the measured
    time, the whole step) of each load."""
    summed, longer, whole = (np.array(column) for column in zip(*seen, strict=True))
    square = float(np.sum((summed / whole) ** 2))
    found = float(np.sum(summed * longer / whole**2)) / square if square else 1.0
    factor = min(MAX_TOGETHER, max(1 / MAX_TOGETHER, found))
    return factor, math.sqrt(float(np.mean(((factor * summed - longer) / whole) ** 2)))
