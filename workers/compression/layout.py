"""Names and shapes of a model's tensors, for code that walks it layer by layer."""

from __future__ import annotations

from collections.abc import Iterator

from profiler.linears import EXPERT
from profiler.types import ModelSpec


def linear_modules(spec: ModelSpec) -> tuple[str, ...]:
    """The linear layers of a hidden layer, by their names below it (`self_attn.q_proj`), without experts'
    layers.
    """
    return tuple(name for name in spec.linears if EXPERT not in name)


def at_layer(spec: ModelSpec, layer: int) -> str:
    """The prefix of the names of a hidden layer's tensors: `model.layers.3.`"""
    return f"{spec.layer_prefix}{layer}."


def layer_tensors(spec: ModelSpec) -> tuple[str, ...]:
    """Every tensor of a hidden layer by its name below it, all experts included."""
    experts = max((linear.experts for linear in spec.linears.values()), default=1)
    return tuple(
        name.replace(EXPERT, str(expert))
        for name in spec.layer_shapes
        for expert in range(experts if EXPERT in name else 1)
    )


def all_tensors(spec: ModelSpec) -> Iterator[str]:
    """Every tensor's full name: tensors outside the layers, then layer by layer."""
    yield from spec.other_shapes
    for layer in range(spec.num_layers):
        yield from (f"{at_layer(spec, layer)}{name}" for name in layer_tensors(spec))


def added_rows(base: ModelSpec, tuned: ModelSpec) -> int:
    """The number of tokens by which the fine-tune's vocabulary is larger than the base's; negative if
    smaller.
    """
    return tuned.other_shapes[tuned.embedding][0] - base.other_shapes[base.embedding][0]


def tables(spec: ModelSpec) -> frozenset[str]:
    """The embedding and the head, which papers leave out of their counts."""
    return frozenset({spec.embedding, spec.head})
