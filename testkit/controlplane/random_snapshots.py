"""Snapshots, requests and states drawn at random; hashes, as policies break ties by them, in plain Python."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from controlplane.routing.snapshot import (
    IN_SLOT,
    NO_PROMISE,
    ORDER,
    REQUEST,
    Snapshot,
    new_snapshot,
    promise_class,
)
from controlplane.routing.state import RouterState, new_state
from profiler.compiled import records
from profiler.step_time.records import CLASSES, KINDS, PREFILL_KNOTS, RANK_CLASSES, STEP_MODEL

_ALL = (1 << 64) - 1
_STEP = 0x9E3779B97F4A7C15


class World(NamedTuple):
    """The input of a policy; `request` is a record."""

    snapshot: Snapshot
    request: Any
    state: RouterState

    @property
    def usable(self) -> list[int]:
        return [g for g, group in enumerate(self.snapshot.groups) if group.usable]

    def model(self, g: int) -> Any:
        return self.snapshot.models[self.snapshot.groups[g].model]

    def held(self, g: int) -> Any:
        """The request's variant in a group."""
        return self.snapshot.held[self.request.variant, g]

    def tie(self, g: int) -> int:
        return pair(int(self.request.key), int(self.snapshot.groups[g].key))


def mixed(number: int) -> int:
    number = ((number ^ (number >> 30)) * 0xBF58476D1CE4E5B9) & _ALL
    number = ((number ^ (number >> 27)) * 0x94D049BB133111EB) & _ALL
    return number ^ (number >> 31)


def pair(one: int, other: int) -> int:
    return mixed((mixed((one + _STEP) & _ALL) + other) & _ALL)


def next_draw(state: RouterState) -> int:
    """The 53 bits that the next random choice is made with."""
    return mixed((int(state.chance[0].state) + _STEP) & _ALL) >> 11


def world(seed: int, groups: int | None = None) -> World:
    """Up to eight groups, or the given number, of up to two models, with few requests each, so that ties
    are common."""
    rng = np.random.default_rng(seed)
    models = records(STEP_MODEL, int(rng.integers(1, 3)))
    for model in models:
        _fill_model(model, rng)
    variants = int(rng.integers(2, 7))
    some = int(rng.integers(0, 9))
    snapshot = new_snapshot(some if groups is None else groups, variants, models)
    state = new_state(int(rng.integers(1, 1 << 60)))
    for v in range(1, variants):
        _fill_variant(snapshot.variants[:, v], rng)
    for g in range(len(snapshot.groups)):
        _fill_group(snapshot, g, rng)
    return World(snapshot, _request(variants, rng), state)


def _fill_model(model: Any, rng: np.random.Generator) -> None:
    model.decode_s[:] = rng.uniform(5e-3, 20e-3) + np.arange(513) * rng.uniform(1e-5, 2e-4)
    model.prefill_s[:] = rng.uniform(5e-3, 20e-3) + np.arange(PREFILL_KNOTS + 1) * rng.uniform(1e-4, 6e-4)
    model.prefill_grain = 64
    model.context_s = rng.uniform(0, 1e-7)
    model.padded_s = rng.choice([0.0, rng.uniform(1e-7, 1e-5)])
    model.launch_s[:] = rng.uniform(0, 1e-3, KINDS)
    model.batched_tokens = rng.integers(1, 1024)
    model.max_rows = rng.integers(1, 12)
    model.kv_tokens = rng.integers(500, 5000)
    model.slots = rng.integers(1, 6)


def _fill_variant(of_models: Any, rng: np.random.Generator) -> None:
    number = int(rng.integers(0, CLASSES))
    kind = int(rng.integers(0, KINDS))
    for variant in of_models:
        variant.rank_class, variant.rank, variant.kind = number, RANK_CLASSES[number], kind
        variant.row_s, variant.variant_s = rng.uniform(0, 1e-3), rng.uniform(0, 3e-3)
        variant.token_s = rng.uniform(0, 1e-5)


def _fill_group(snapshot: Snapshot, g: int, rng: np.random.Generator) -> None:
    group = snapshot.groups[g]
    group.key = rng.integers(1, 1 << 63, dtype=np.uint64)
    group.usable = rng.random() < 0.8
    group.model = rng.integers(len(snapshot.models))
    group.correction = rng.uniform(0.8, 1.3)
    group.unfilled = rng.choice([0.0, rng.uniform(0, 3000)])
    for v in range(snapshot.held.shape[0]):
        snapshot.held[v, g].where = rng.integers(0, IN_SLOT + 1)
        for _ in range(int(rng.choice([0, 0, 0, 1, 2, 3]))):
            _add_row(
                snapshot, g, v, float(rng.integers(10, 600)), rng.choice([math.inf, rng.uniform(5e-3, 0.1)])
            )
    if group.batch.rows:
        group.step_s = group.correction * step_s(snapshot, g, 0, 0.0, 0)


def _add_row(snapshot: Snapshot, g: int, v: int, context: float, tpot_s: float) -> None:
    group, variant, held = (
        snapshot.groups[g],
        snapshot.variants[snapshot.groups[g].model, v],
        snapshot.held[v, g],
    )
    number = promise_class.py_func(tpot_s) if hasattr(promise_class, "py_func") else promise_class(tpot_s)
    group.batch.rows += 1
    group.batch.context += context
    group.promises[number] += 1
    group.tightest = min(group.tightest, number)
    if v:
        group.batch.rows_s += variant.row_s
        group.batch.by_kind[variant.kind] += 1
        group.batch.by_class[variant.rank_class] += 1
        group.batch.ranked += 1 if variant.rank else 0
        if held.rows == 0:
            group.batch.variants_s += variant.variant_s
            group.distinct += 1
    held.rows += 1


def step_s(snapshot: Snapshot, g: int, v: int, context: float, more: int) -> float:
    """A step of a group with `more` rows of a variant, by the formula in `profiler.step_time.records`, from
    what each variant has in the group."""
    group, model = snapshot.groups[g], snapshot.models[snapshot.groups[g].model]
    rows = [int(held.rows) + (more if at == v else 0) for at, held in enumerate(snapshot.held[:, g])]
    there = [(count, snapshot.variants[group.model, at]) for at, count in enumerate(rows) if count and at]
    ranked = [(count, int(variant.rank)) for count, variant in there if variant.rank]
    seconds = float(model.decode_s[sum(rows)]) + float(model.context_s) * (group.batch.context + context)
    seconds += sum(count * float(variant.row_s) + float(variant.variant_s) for count, variant in there)
    seconds += sum(float(model.launch_s[kind]) for kind in {int(variant.kind) for _, variant in there})
    if ranked:
        seconds += float(model.padded_s) * sum(count for count, _ in ranked) * max(rank for _, rank in ranked)
    return float(seconds)


def _request(variants: int, rng: np.random.Generator) -> Any:
    made = records(REQUEST, 1)[0]
    made.variant = rng.integers(variants)
    made.prompt = rng.integers(1, 1500)
    made.output = rng.integers(1, 600)
    made.ttft_s, made.tpot_s = math.inf, rng.choice([math.inf, rng.uniform(5e-3, 0.1)])
    made.key = rng.integers(1, 1 << 63, dtype=np.uint64)
    made.promise = NO_PROMISE
    return made


def permuted(before: World, seed: int) -> tuple[World, list[int]]:
    """The same groups in another order; `order[new]` is where a group was before."""
    order = [int(g) for g in np.random.default_rng(seed).permutation(len(before.snapshot.groups))]
    snapshot = before.snapshot._replace(
        groups=before.snapshot.groups[order].copy(),
        held=before.snapshot.held[:, order].copy(),
        orders=records(ORDER, before.snapshot.orders.shape),
    )
    return World(snapshot, before.request, copied(before.state)), order


def copied(state: RouterState) -> RouterState:
    return RouterState(*(part.copy() for part in state))


def with_idle_group(before: World) -> World:
    """One group more, the last, of the first model: idle, usable, with no variant at hand."""
    idle = new_snapshot(1, before.snapshot.held.shape[0], before.snapshot.models)
    idle.groups.key = 1
    snapshot = before.snapshot._replace(
        groups=_joined(before.snapshot.groups, idle.groups),
        held=_joined(before.snapshot.held.T, idle.held.T).T.copy(),
    )
    return World(snapshot, before.request, copied(before.state))


def _joined(one: Any, other: Any) -> Any:
    made = records(one.dtype, (len(one) + len(other), *one.shape[1:]))
    made[: len(one)], made[len(one) :] = one, other
    return made


ABSURD = (math.nan, math.inf, -math.inf, -1.0, 0.0, 1e300, -1e300, 1e-300)


def made_absurd(before: World, seed: int) -> World:
    """Numbers that cannot be, in every field that is no index into another array."""
    rng = np.random.default_rng(seed)

    def some(number: float) -> Any:
        return rng.choice(ABSURD) if rng.random() < 0.4 else number

    def some_int(number: int, bits: int) -> Any:
        values = (-1, 0, -(1 << (bits - 2)), 1 << (bits - 2), -(1 << (bits - 1)), (1 << (bits - 1)) - 1)
        return int(rng.choice(values)) if rng.random() < 0.4 else number

    for model in before.snapshot.models:
        for name in ("prefill_grain", "context_s", "padded_s"):
            model[name] = some(model[name])
        for name in ("batched_tokens", "max_rows", "kv_tokens", "slots"):
            model[name] = some_int(model[name], 64)
        model.decode_s[:] = [some(seconds) for seconds in model.decode_s]
        model.prefill_s[:] = [some(seconds) for seconds in model.prefill_s]
    for group in before.snapshot.groups:
        for name in ("unfilled", "step_s", "tpot_s", "correction", "stretch"):
            group[name] = some(group[name])
        group.distinct, group.tightest = some_int(group.distinct, 32), some_int(group.tightest, 32)
        group.batch.rows, group.batch.context = some_int(group.batch.rows, 64), some(group.batch.context)
        group.batch.rows_s, group.batch.variants_s = some(group.batch.rows_s), some(group.batch.variants_s)
        group.batch.by_class[:] = [some_int(count, 32) for count in group.batch.by_class]
    for held in before.snapshot.held.reshape(-1):
        held.rows, held.where = some_int(held.rows, 32), some_int(held.where, 32)
    for asked in before.state.classes:
        asked.rate_tokens, asked.rate_context, asked.rate_promise = some(1.0), some(1.0), some(1.0)
    for name in ("prompt", "output", "ttft_s", "tpot_s", "waited_s"):
        before.request[name] = some(before.request[name])
    return before
