"""Bytes of a rank, as the largest of some lines over its stage's layers, and functions of these lines.

A line is (bytes outside the layers, bytes of each layer). `figures_lines` makes them from explicit figures.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from placement.solver.plan import Estimator, Lines, Shape
from placement.solver.request import ModelFigures, Request
from placement.solver.view import Ints
from profiler.plans import even_stages


def rank_bytes(lines: Lines, layers: int) -> int:
    return max(fixed + layers * each for fixed, each in lines)


def most_layers(lines: Lines, room: Ints) -> Ints:
    """How many layers fit into each of `room`; negative if not even the fixed bytes fit."""
    fitting = [np.floor_divide(room - fixed, each) for fixed, each in lines]
    most: Ints = np.minimum.reduce(fitting)
    return most


def stage_bytes(estimator: Estimator, shape: Shape, layers: Sequence[int]) -> tuple[int, ...]:
    """Bytes of each rank of a stage, by stage."""
    return tuple(rank_bytes(estimator.lines(shape, stage), n) for stage, n in enumerate(layers))


def total_bytes(estimator: Estimator, shape: Shape, layers: int) -> int:
    """Bytes of all ranks, with even stages. Other splits never need less, and more only for variants'
    slots."""
    return shape.tp * sum(stage_bytes(estimator, shape, even_stages(layers, shape.pp)))


def figures_lines(request: Request, shape: Shape, stage: int) -> Lines:
    """The lines of a model's explicit figures: weights, and keys and values of all tokens in the cache."""
    compression, tp = shape.compression, shape.tp
    each = -(-compression.layer_bytes // tp) + request.kv_tokens * kv_rank_bytes(request.model, shape)
    return ((_fixed_bytes(request.model, shape, stage), each),)


def kv_rank_bytes(model: ModelFigures, shape: Shape) -> int:
    """Bytes of one token in one layer; KV heads are copied if TP exceeds them."""
    heads = max(1, model.kv_heads // shape.tp)
    return -(-shape.compression.kv_bytes_per_token * heads // model.kv_heads)


def _fixed_bytes(model: ModelFigures, shape: Shape, stage: int) -> int:
    """Bytes of a rank of this stage that do not depend on its layers."""
    first, last = stage == 0, stage == shape.pp - 1
    embeds, ends = (True, True) if model.tables_everywhere else (first, last)
    embedding, head = -(-model.embedding_bytes // shape.tp), -(-model.head_bytes // shape.tp)
    if model.tied and not (embeds and ends):
        head = embedding  # a stage without the embedding needs a copy of it
    tables = (embedding if embeds else 0) + (head if ends and not (model.tied and embeds) else 0)
    return tables + model.overhead_bytes + (model.last_overhead_bytes if last else 0)
