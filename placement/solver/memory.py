"""Bytes of a rank: what each layer adds, and what a stage holds beside its layers."""

from __future__ import annotations

from collections.abc import Sequence

from placement.solver.plan import Shape
from placement.solver.request import ModelFigures, Request


def layer_rank_bytes(request: Request, shape: Shape) -> int:
    """A rank's share of one layer: weights, and keys and values of all tokens that the cache holds."""
    form, tp = shape.compression, shape.tp
    return -(-form.layer_bytes // tp) + request.kv_tokens * kv_rank_bytes(request.model, shape)


def kv_rank_bytes(model: ModelFigures, shape: Shape) -> int:
    """Of one token in one layer; KV heads are copied where TP exceeds them."""
    heads = max(1, model.kv_heads // shape.tp)
    return -(-shape.compression.kv_bytes_per_token * heads // model.kv_heads)


def fixed_bytes(model: ModelFigures, shape: Shape, stage: int) -> int:
    """What a rank of this stage holds whatever its layers."""
    first, last = stage == 0, stage == shape.pp - 1
    embedding, head = -(-model.embedding_bytes // shape.tp), -(-model.head_bytes // shape.tp)
    if model.tied and not (first and last):
        head = embedding  # a stage without the embedding needs a copy of it
    tables = (embedding if first else 0) + (head if last and not (model.tied and first) else 0)
    return tables + model.overhead_bytes + (model.last_overhead_bytes if last else 0)


def stage_bytes(request: Request, shape: Shape, layers: Sequence[int]) -> tuple[int, ...]:
    """Bytes of each rank of a stage, by stage."""
    each = layer_rank_bytes(request, shape)
    return tuple(n * each + fixed_bytes(request.model, shape, stage) for stage, n in enumerate(layers))


def total_bytes(request: Request, shape: Shape) -> int:
    """Over all ranks; the same however layers are split."""
    fixed = sum(fixed_bytes(request.model, shape, stage) for stage in range(shape.pp))
    return shape.tp * (request.model.layers * layer_rank_bytes(request, shape) + fixed)


def usable_bytes(free_bytes: int, total_bytes_of_gpu: int, headroom: float) -> int:
    """Of a GPU: what is free, less what is to stay free."""
    return free_bytes - int(headroom * total_bytes_of_gpu)
