"""Lower bounds of the seconds of any split of a model's layers over a set of groups, as arrays.

The bounds ignore the slowest stage, or the capacity of stages, which only add time. They show which sets of
groups, and which orders of a set, are worth a split, and in which sequence.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from placement.solver.cluster import Link
from placement.solver.costs import Costs
from placement.solver.groups import Groups
from placement.solver.objective import LowerBounds, StepLimits, limits_of
from placement.solver.orders import caps_by_ends, domain, ends
from placement.solver.plan import Estimator, HopSeconds, Shape
from placement.solver.request import Request
from placement.solver.view import Bools, Floats, Ints

FAINT = 1e-6  # relative; stages with a smaller difference count as alike
MAX_RATIOS = 8
MAX_PRICES = 16


@dataclass(frozen=True)
class Terms:
    """What all pipelines of one shape have in common.

    `tokens` is the number of tokens after the first, `batches` the batches in flight; every token takes at
    least `turns_s`. `hops` are the seconds of a hop, by link.
    """

    shape: Shape
    layers: int
    tokens: int
    batches: float
    turns_s: float
    hops: dict[Link, HopSeconds]
    limits: StepLimits


def terms_of(request: Request, shape: Shape, estimator: Estimator) -> Terms:
    return Terms(
        shape=shape,
        layers=request.model.layers,
        tokens=request.output_tokens - 1,
        batches=estimator.groups(shape),
        turns_s=estimator.turns_s(shape),
        hops={link: estimator.hop_s(shape, link) for link in Link},
        limits=limits_of(request, estimator),
    )


def of_sets(costs: Costs, sets: Ints, terms: Terms) -> Floats:
    """Lower bounds for each set, infinite if no order is within the limits: the larger of the cheapest
    filling (without the slowest stage) and the most even pace."""
    caps = _caps(costs)[sets]
    prefill, decode = costs.prefill[sets], costs.decode[sets]
    cheapest = _filled(caps, prefill + terms.tokens * decode, terms.layers)
    pace = terms.batches * terms.layers / (1 / decode).sum(axis=1)
    bounds = np.maximum(cheapest, terms.layers * prefill.min(axis=1) + terms.tokens * pace)
    hops, hop_s = terms.shape.pp - 1, terms.hops[Link.FAST]
    prompt_rest_s = costs.prefill_rest[sets].min(axis=1) + hops * hop_s.prompt
    token_rest_s = costs.decode_rest[sets].min(axis=1) + hops * hop_s.token
    within = _within(terms, caps, (prefill, decode), (prompt_rest_s, token_rest_s))
    return np.where(within, bounds, np.inf)


def may_hold(costs: Costs, terms: Terms) -> bool:
    """Whether a set of these columns may hold all layers; False: no set does."""
    caps = _caps(costs)
    caps = caps[caps >= 1]
    return len(caps) >= terms.shape.pp and bool(
        _largest(caps.astype(np.float64), terms.shape.pp).sum() >= terms.layers
    )


def _caps(costs: Costs) -> Ints:
    """The most layers in any position of a pipeline."""
    caps: Ints = np.maximum(np.maximum(costs.first, costs.last), costs.middle)
    return caps


def of_any(costs: Costs, terms: Terms) -> LowerBounds:
    """Bounds for all sets of these columns that hold the layers (`may_hold`), without the request path."""
    caps = _caps(costs)
    able = caps >= 1
    caps, stages = caps[able], terms.shape.pp
    prefill, decode = costs.prefill[able], costs.decode[able]
    prefill_rest_s, decode_rest_s = costs.prefill_rest[able].min(), costs.decode_rest[able].min()
    hop_s = terms.hops[Link.FAST]
    prompt_s = _least(caps, prefill, terms) + prefill_rest_s + (stages - 1) * hop_s.prompt
    token_s = _least(caps, decode, terms) + decode_rest_s + (stages - 1) * hop_s.token
    pace_s = terms.batches * terms.layers / _largest(1 / decode, stages).sum()
    token_s = max(token_s, pace_s, terms.turns_s)
    both_s = _least(caps, prefill + terms.tokens * decode, terms) + prefill_rest_s
    both_s += terms.tokens * decode_rest_s
    both_s += (stages - 1) * (hop_s.prompt + terms.tokens * hop_s.token)
    latency_s = max(both_s, prompt_s + terms.tokens * token_s)
    return LowerBounds(float(prompt_s), float(token_s), float(latency_s))


def _least(caps: Ints, seconds: Floats, terms: Terms) -> float:
    """The least seconds of any set's layers. With a price on each layer that is not taken, each stage takes
    all it can or one layer, and the best stages are chosen (Lagrange's dual of taking all layers)."""
    some = np.linspace(0, len(seconds) - 1, min(len(seconds), MAX_PRICES)).astype(np.int64)
    prices = np.sort(seconds)[some][:, None]
    spared = (prices - seconds) * np.where(prices > seconds, caps, 1)
    gained = _largest(spared, terms.shape.pp).sum(axis=1)
    return float((prices[:, 0] * terms.layers - gained).max())


def _largest(values: Floats, count: int) -> Floats:
    """The `count` largest values of each row."""
    rest = values.shape[-1] - count
    largest: Floats = np.partition(values, rest, axis=-1)[..., rest:]
    return largest


def of_ends(costs: Costs, groups: Groups, columns: Ints, terms: Terms) -> Floats:
    """Bounds for each choice of `ends` of one set; infinite if the layers do not fit, or not within limits.

    The first bound fills the cheapest stages without regard to the slowest stage. In the second bound all
    stages take equally long, with `batches` in flight and unlimited capacity. Limits raise the first bound.
    """
    caps, pairs = caps_by_ends(costs, columns), ends(len(columns))
    prefill, decode = costs.prefill[columns], costs.decode[columns]
    last = pairs[:, 1]
    hop_s = _least_hops(groups, columns) @ np.array([terms.hops[link] for link in Link])
    prompt_rest_s = costs.prefill_rest[columns][last] + hop_s[:, 0]
    token_rest_s = costs.decode_rest[columns][last] + hop_s[:, 1]
    filled = _filled(caps, prefill + terms.tokens * decode, terms.layers) + terms.tokens * token_rest_s
    gaps = np.tile(costs.decode_gap[columns], (len(pairs), 1))
    gaps[np.arange(len(pairs)), last] = costs.decode_rest[columns][last]
    pace = terms.batches * (terms.layers + (gaps / decode).sum(axis=1)) / (1 / decode).sum()
    bounds = np.maximum(filled, terms.layers * prefill.min() + terms.tokens * pace) + prompt_rest_s
    for ratio in _ratios(terms, prefill, decode):
        mixed = _filled(caps, prefill + ratio * decode, terms.layers) + prompt_rest_s + ratio * token_rest_s
        bounds = np.maximum(bounds, _limited(terms, ratio, mixed))
    possible = (caps.min(axis=1) >= 1) & (caps.sum(axis=1) >= terms.layers)
    possible &= _within(terms, caps, (prefill, decode), (prompt_rest_s, token_rest_s))
    return np.where(possible, bounds, np.inf)


def _ratios(terms: Terms, prefill: Floats, decode: Floats) -> list[float]:
    """With limits: the ratios of a token's weight to a prompt's at which another stage becomes the
    cheapest."""
    if min(terms.limits.prompt_s, terms.limits.token_s) == np.inf:
        return []
    dearer = np.subtract.outer(prefill, prefill)
    cheaper = -np.subtract.outer(decode, decode)
    swaps = (dearer > FAINT * prefill.min()) & (cheaper > FAINT * decode.min())
    ratios = np.unique(dearer[swaps] / cheaper[swaps])
    some = np.linspace(0, len(ratios) - 1, min(len(ratios), MAX_RATIOS)).astype(np.int64)
    chosen: list[float] = ratios[some].tolist()
    return chosen


def _limited(terms: Terms, ratio: float, mixed: Floats) -> Floats | float:
    """The least latency if prompt + ratio x token is at least `mixed`: what keeps a limit costs more
    elsewhere (the dual of the limit)."""
    if ratio < terms.tokens:
        if terms.limits.prompt_s == np.inf:
            return 0.0
        scale = terms.tokens / ratio
        return scale * mixed - (scale - 1) * terms.limits.prompt_s
    if terms.limits.token_s == np.inf:
        return 0.0
    return mixed - (ratio - terms.tokens) * terms.limits.token_s


def _within(terms: Terms, caps: Ints, seconds: tuple[Floats, Floats], beside: tuple[Floats, Floats]) -> Bools:
    """Whether the cheapest filling for a prompt, and the cheapest for a token, are within their limits."""
    within = np.ones(len(caps), dtype=bool)
    for limit, each, rest in zip((terms.limits.prompt_s, terms.limits.token_s), seconds, beside, strict=True):
        if limit < np.inf:
            within &= _filled(caps, each, terms.layers) + rest <= limit
    return within


def _filled(caps: Ints, seconds: Floats, layers: int) -> Floats:
    """Seconds of all layers by row of `caps`: at least one layer on each stage, then the cheapest stages
    first."""
    each = np.broadcast_to(seconds, caps.shape)
    order = np.argsort(each, axis=1, kind="stable")
    each, room = np.take_along_axis(each, order, axis=1), np.take_along_axis(caps - 1, order, axis=1)
    taken = 1 + np.clip(layers - caps.shape[1] - (np.cumsum(room, axis=1) - room), 0, room)
    least: Floats = (taken * each).sum(axis=1)
    return least


def _least_hops(groups: Groups, columns: Ints) -> Ints:
    """(pairs, links): the least number of crossings of each link, for each choice of `ends`."""
    pairs, nodes = ends(len(columns)), groups.node[columns]
    places = {(int(groups.node[k]), domain(groups, k)) for k in columns.tolist()}
    visited = len(np.unique(nodes))
    left = visited - 1 + ((nodes[pairs[:, 0]] == nodes[pairs[:, 1]]) & (visited > 1))
    # A path that returns to a node may enter a new domain of it: this saves a hop within the node.
    within = len(places) - visited
    crossed = np.zeros((len(pairs), len(Link)), dtype=np.int64)
    crossed[:, Link.NETWORK] = left
    crossed[:, Link.NODE] = within - np.minimum(within, left - (visited - 1))
    crossed[:, Link.FAST] = np.maximum(0, len(columns) - 1 - left - crossed[:, Link.NODE])
    return crossed
