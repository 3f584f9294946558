"""The contents of a config.json: the layers, which are all alike, the tables, and facts of attention."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from profiler.linears import Heads, Linear

Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class Window:
    """In `layers` of the model's layers a token attends to the last `tokens` only."""

    tokens: int | None = None
    layers: int = 0


@dataclass(frozen=True)
class Description:
    """A model, by the names and shapes of its tensors in safetensors files.

    `linears` and `norms` are of one hidden layer, named below `layer_prefix`N.; in names of experts `*`
    stands for the expert's number. `norms` and `outer` (outside the layers) are whole tensors; every rank
    with the layer holds them. No family has a table of positions: all use rotary embeddings or ALiBi.
    `intermediate` is the width of the MLP, or of one expert. `adaptable`: variants of this model can be
    served. `flags` are further facts that change what the stored weights mean; `skipped` are endings of
    stored tensors that engines do not read.
    """

    architecture: str
    layers: int
    hidden: int
    intermediate: int
    vocab: int
    max_position: int
    heads: Heads
    linears: dict[str, Linear]
    norms: Shapes
    outer: Shapes
    tied: bool = False
    window: Window = Window()
    layer_prefix: str = "model.layers."
    embedding: str = "model.embed_tokens.weight"
    head: str = "lm_head.weight"
    head_bias: bool = False
    adaptable: bool = False
    allreduces: int = 2
    flags: dict[str, bool] = field(default_factory=dict)
    skipped: tuple[str, ...] = ()

    def layer_shapes(self) -> Shapes:
        """Every tensor of one hidden layer; one tensor stands for those of all experts."""
        shapes: Shapes = {}
        for name, linear in self.linears.items():
            shapes[f"{name}.weight"] = (linear.out, linear.into)
            if linear.bias:
                shapes[f"{name}.bias"] = (linear.out,)
        return {**shapes, **self.norms}

    def other_shapes(self) -> Shapes:
        """Every tensor outside the hidden layers, by its full name."""
        table = (self.vocab, self.hidden)
        shapes: Shapes = {self.embedding: table, **self.outer}
        if not self.tied:
            shapes[self.head] = table
        if self.head_bias:
            shapes[f"{self.head.removesuffix('.weight')}.bias"] = (self.vocab,)
        return shapes

    def adaptable_shapes(self) -> dict[str, tuple[int, int]]:
        """(out, in) of each module that variants may change, by its short name; empty if none may be
        changed."""
        linears = self.linears if self.adaptable else {}
        return {name.rpartition(".")[2]: (linear.out, linear.into) for name, linear in linears.items()}

    @property
    def layer_elements(self) -> int:
        return sum(linear.elements for linear in self.linears.values()) + elements(self.norms)

    @property
    def other_elements(self) -> int:
        return elements(self.other_shapes())

    def facts(self) -> dict[str, object]:
        """Facts that change the meaning of the stored weights: part of the checkpoint's fingerprint."""
        return {
            "architecture": self.architecture,
            "layers": self.layers,
            "hidden": self.hidden,
            "heads": self.heads.query,
            "kv_heads": self.heads.kv,
            "head_dim": self.heads.dim,
            "intermediate": self.intermediate,
            "vocab": self.vocab,
            "tied": self.tied,
            **self.flags,
        }


def elements(shapes: Shapes) -> int:
    return sum(math.prod(shape) for shape in shapes.values())


def layer_norm(name: str, width: int, *, bias: bool = True) -> Shapes:
    """The tensors of a LayerNorm; those of an RMSNorm have no bias."""
    shapes: Shapes = {f"{name}.weight": (width,)}
    return {**shapes, f"{name}.bias": (width,)} if bias else shapes


def rms_norms(width: int, *names: str) -> Shapes:
    return {f"{name}.weight": (width,) for name in names}
