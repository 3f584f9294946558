"""Variants in a host's memory: the least recently used ones leave when it is full. Compiled.

They are linked in the order of their use (`older`, `newer` of `controlplane.simulation.world.WHERE`), but
only if memory is bounded. A variant in a slot, or on its way there, stays in the host's memory, too.
"""

from __future__ import annotations

import math

import numpy as np

from controlplane.routing.snapshot import ELSEWHERE
from controlplane.simulation.world import NO_INDEX, World
from profiler.compiled import compiled


def fill(world: World, limit_bytes: float) -> None:
    """Give every host `limit_bytes`; the first variants in its memory that fit stay."""
    world.engines.host_limit = limit_bytes
    if limit_bytes == math.inf:
        return
    for g, engine in enumerate(world.engines):
        sizes = world.truth.variants.bytes[engine.model]
        where = world.where[g]
        held = np.flatnonzero(where.in_host)
        held = held[held > 0]
        fits = np.cumsum(sizes[held]) <= limit_bytes
        where.in_host[held[~fits]] = 0
        world.seen.held.where[held[~fits], g] = ELSEWHERE
        held = held[fits]
        if len(held):
            where.newer[held[:-1]], where.older[held[1:]] = held[1:], held[:-1]
            engine.oldest, engine.newest = held[0], held[-1]
            engine.host_bytes = sizes[held].sum()


@compiled
def keep(world: World, g: int, variant: int) -> None:
    """Note that a variant is read into the host's memory, or used there."""
    engine, where = world.engines[g], world.where[g, variant]
    if engine.host_limit == math.inf:
        where.in_host = 1
        return
    if where.in_host:
        _unlink(world, g, variant)
    else:
        engine.host_bytes += world.truth.variants[engine.model, variant].bytes
        where.in_host = 1
    where.older, where.newer = engine.newest, NO_INDEX
    if engine.newest != NO_INDEX:
        world.where[g, engine.newest].newer = variant
    else:
        engine.oldest = variant
    engine.newest = variant
    _make_room(world, g, variant)


@compiled
def _unlink(world: World, g: int, variant: int) -> None:
    engine, where = world.engines[g], world.where[g, variant]
    if where.older != NO_INDEX:
        world.where[g, where.older].newer = where.newer
    else:
        engine.oldest = where.newer
    if where.newer != NO_INDEX:
        world.where[g, where.newer].older = where.older
    else:
        engine.newest = where.older


@compiled
def _make_room(world: World, g: int, fresh: int) -> None:
    engine = world.engines[g]
    variant = engine.oldest
    while engine.host_bytes > engine.host_limit and variant != NO_INDEX:
        newer = world.where[g, variant].newer
        if variant != fresh and world.where[g, variant].slot == NO_INDEX:
            _unlink(world, g, variant)
            world.where[g, variant].in_host = 0
            world.seen.held[variant, g].where = ELSEWHERE
            engine.host_bytes -= world.truth.variants[engine.model, variant].bytes
        variant = newer
