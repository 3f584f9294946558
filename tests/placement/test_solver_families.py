"""Which groups are compared and combined: against what each would be by definition."""

from __future__ import annotations

import itertools
import random
from typing import Any

import numpy as np
from numpy.typing import NDArray

from placement.solver.bounds import Terms, of_any
from placement.solver.bounds import may_hold as any_may_hold
from placement.solver.cluster import Link
from placement.solver.costs import Costs
from placement.solver.families import Family
from placement.solver.groups import Groups
from placement.solver.objective import StepLimits
from placement.solver.orders import holds, may_hold
from placement.solver.places import Shared
from placement.solver.plan import HopSeconds, Shape
from placement.solver.request import Compression
from placement.solver.shapes import shapes
from testkit.solver_instances import random_cluster, random_request

Rows = NDArray[Any]

COUNT = 40


def groups(rng: np.random.Generator) -> Groups:
    """Single GPUs of two types on few nodes, many of them alike; some domains are those of the nodes."""
    node = rng.integers(0, 4, COUNT)
    domain = node if rng.random() < 0.5 else node * 3 + rng.integers(0, 3, COUNT)
    return Groups(
        members=np.arange(COUNT).reshape(-1, 1),
        node=node,
        type=rng.integers(0, 2, COUNT),
        nvlink_domain=domain,
        usable=rng.integers(0, 12, COUNT),
        slowdown=rng.integers(1, 9, COUNT) / 2.0,
        fill=np.ones(COUNT),
        grain=np.ones(COUNT),
    )


def costs(rng: np.random.Generator) -> Costs:
    seconds = rng.random((5, COUNT))
    first, middle, last = (rng.integers(0, rng.integers(1, 5) + 1, COUNT) for _ in range(3))
    return Costs(seconds[0], seconds[1], seconds[2], seconds[3], seconds[4], first, middle, last)


def held(of: Costs, columns: Rows, layers: int) -> bool:
    """Whether any order of these groups holds N layers, each group at least one."""
    for order in itertools.permutations(columns.tolist()):
        caps = [of.first[order[0]], *(of.middle[k] for k in order[1:-1]), of.last[order[-1]]]
        if min(caps) >= 1 and sum(caps) >= layers:
            return True
    return False


def test_sets_hold_all_layers_where_some_order_does() -> None:
    seen = set()
    for seed in range(150):
        rng = np.random.default_rng(seed)
        of, stages = costs(rng), int(rng.integers(2, 6))
        order = rng.permutation(COUNT)
        layers = int(rng.integers(stages, 4 * stages))
        windows = np.array([order[start : start + stages] for start in range(COUNT - stages + 1)])
        possible = [held(of, columns, layers) for columns in windows]
        assert holds(of, windows, layers).tolist() == possible
        assert (may_hold(of, layers, order, stages) >= possible).all()  # none that does is left out
        seen |= set(possible)
    assert seen == {True, False}


def test_bounds_of_any_set_are_below_every_split_of_every_set() -> None:
    """Seven groups, each as good at either end and between, every set of them and every split."""
    near, none = [], 0
    for seed in range(60):
        rng = np.random.default_rng(seed)
        stages, layers, tokens = int(rng.integers(2, 4)), int(rng.integers(4, 10)), int(rng.integers(0, 20))
        caps, seconds = rng.integers(0, 6, 7), rng.random((2, 7)) + 0.2
        rests, hops, batches = rng.random((2, 7)), rng.random(2), float(rng.integers(1, stages + 1))
        of = Costs(seconds[0], seconds[1], rests[0], rests[1], np.zeros(7), caps, caps, caps)
        shape = Shape(Compression("none", 1.0, 1, 1), 1, stages)
        crossed = {link: HopSeconds(float(hops[0]), float(hops[1])) for link in Link}
        terms = Terms(shape, layers, tokens, batches, 0.0, crossed, StepLimits(np.inf, np.inf))
        least = np.full(3, np.inf)
        for columns in itertools.permutations(range(7), stages):
            k = list(columns)
            for split in itertools.product(*(range(1, int(cap) + 1) for cap in caps[k])):
                if sum(split) != layers:
                    continue
                each = seconds[:, k] * split
                each[:, -1] += rests[:, k[-1]]
                prompt, row = each.sum(axis=1) + hops * (stages - 1)
                token = max(row, batches * each[1].max())
                least = np.minimum(least, (prompt, token, prompt + tokens * token))
        if least[0] == np.inf:
            none += 1
            continue
        assert any_may_hold(of, terms)
        bounds = of_any(of, terms)
        found = np.array([bounds.ttft_s, bounds.tpot_s, bounds.latency_s])
        assert (found <= least * (1 + 1e-9)).all(), seed
        near += (found / least).tolist()
    assert none > 2
    assert np.mean(near) > 0.8


def test_the_best_of_a_band_are_the_best_of_all() -> None:
    for seed in range(100):
        rng = np.random.default_rng(seed)
        every, size = groups(rng), int(rng.integers(1, 9))
        band = Family(every).band(size)
        assert size > 6 or len(band) < COUNT
        for weight in rng.random(4):
            for kind in (0, 1):
                worths = [
                    np.sort((weight * of.usable - (1 - weight) * of.slowdown)[of.type == kind])[-size:]
                    for of in (every, band)
                ]
                assert worths[0].tolist() == worths[1].tolist()


def test_sets_are_neighbours_by_each_key_whatever_was_asked_before() -> None:
    """The orders are by decode, usable memory and its reverse, within NVLink domains, nodes and everywhere;
    each once."""
    for seed in range(40):
        rng = np.random.default_rng(seed)
        family, stages = Family(groups(rng)), int(rng.integers(2, 5))
        of = family.groups
        decodes = [rng.integers(1, 6, COUNT) * of.slowdown for _ in range(6)]
        for decode in (*decodes, *decodes):
            found = family.sets(stages, decode, lambda order, pp: np.ones(len(order) - pp + 1, dtype=bool))
            expected = {
                window
                for place in (of.nvlink_domain, of.node, np.zeros(COUNT))
                for key in (decode, of.usable, -of.usable)
                for window in neighbours(place, key, of.usable, stages)
            }
            assert [tuple(row) for row in found.tolist()] == sorted(expected)


def neighbours(place: Rows, key: Rows, usable: Rows, stages: int) -> list[tuple[int, ...]]:
    order = sorted(range(COUNT), key=lambda k: (place[k], key[k], usable[k], k))
    windows = (tuple(order[start : start + stages]) for start in range(COUNT - stages + 1))
    return [window for window in windows if place[window[0]] == place[window[-1]]]


def test_no_shape_is_left_out_that_has_a_layout() -> None:
    """`holds` by memory alone, against every way to share out GPUs and layers that there is."""
    seen = []
    for seed in range(60):
        rng = random.Random(seed)
        cluster, request = random_cluster(rng, 4), random_request(rng)
        shared = Shared(cluster)
        places, estimator = shared.places(request), shared.estimator(request)
        view, layers = places.view, request.model.layers
        alike = list(zip(view.node.tolist(), view.type.tolist(), strict=True))
        for shape in shapes(request, len(view)):
            rooms = [
                (set(gpus), min(int(view.usable[gpu]) for gpu in gpus))
                for gpus in itertools.combinations(range(len(view)), shape.tp)
                if len({alike[gpu] for gpu in gpus}) == 1
            ]
            fits = False
            for chosen in itertools.permutations(rooms, shape.pp):
                caps = [
                    min((room - fixed) // each for fixed, each in estimator.lines(shape, stage))
                    for stage, (_, room) in enumerate(chosen)
                ]
                apart = len(set().union(*(gpus for gpus, _ in chosen))) == shape.ranks
                fits |= apart and min(caps) >= 1 and sum(caps) >= layers
            holds_some = places.holds(shape, layers, estimator)
            assert holds_some or not fits, (seed, shape)
            seen.append((holds_some, fits))
    assert {(True, True), (False, False)} <= set(seen)
