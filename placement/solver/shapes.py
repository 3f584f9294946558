"""The possible shapes of a model."""

from __future__ import annotations

from placement.solver.plan import Shape
from placement.solver.request import ModelFigures, Request


def tp_divides(model: ModelFigures, tp: int) -> bool:
    """Whether the engine can shard the model `tp` ways: heads split, KV heads split or copied."""
    if model.degrees:
        return tp in model.degrees
    return model.heads % tp == 0 and (model.kv_heads % tp == 0 or tp % model.kv_heads == 0)


def shapes(request: Request, gpus: int) -> tuple[Shape, ...]:
    """Every compression, TP and PP that model and request allow for `gpus` ranks, fewest ranks first."""
    model = request.model
    allowed = [
        Shape(compression, tp, pp)
        for compression in model.compressions
        for tp in range(1, min(request.max_tp, model.heads, gpus) + 1)
        if tp_divides(model, tp) and tp in (compression.degrees or (tp,)) and tp in (request.only_tp or (tp,))
        for pp in range(1, min(request.max_pp, model.layers, gpus // tp) + 1)
        if pp in (request.only_pp or (pp,)) and pp == (len(request.layers) or pp)
    ]
    return tuple(sorted(allowed, key=lambda s: (s.ranks, s.tp, -s.compression.accuracy, s.compression.name)))
