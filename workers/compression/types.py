"""What a method of compression is given and what it gives back, for one linear layer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from profiler.variants.types import VariantKind

Progress = Callable[[float, str], None]
"""Told the share done (0..1) and what is next."""


@dataclass(frozen=True)
class Inputs:
    """What calibration saw of a layer's inputs X [in, tokens]: `gram` is X X^T / tokens, float32 [in, in].

    They are the inputs that the layer gets when all layers before it are compressed already (DeltaZip,
    section 4.2: the base is added back before the next layer's inputs are computed).
    """

    gram: torch.Tensor
    tokens: int


@dataclass(frozen=True)
class Problem:
    """One linear layer to compress: float32 [out, in] weights, on the device where to compute.

    `name` is the module's full name (`model.layers.3.self_attn.q_proj`). `inputs` is None when a method
    asks for no calibration.
    """

    name: str
    base: torch.Tensor
    tuned: torch.Tensor
    inputs: Inputs | None = None

    @property
    def delta(self) -> torch.Tensor:
        return self.tuned - self.base

    @property
    def gram(self) -> torch.Tensor:
        """X X^T / tokens, float32 [in, in]; the identity without calibration: all inputs count alike."""
        if self.inputs is None:
            return torch.eye(self.base.shape[1], device=self.base.device)
        return self.inputs.gram


@dataclass(frozen=True)
class Encoded:
    """One matrix as stored: tensors by part (`values`, `g0.v`, ...), and what delta.json adds for it."""

    parts: Mapping[str, torch.Tensor]
    facts: Mapping[str, Any] = field(default_factory=dict)

    @property
    def size_bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in self.parts.values())


@dataclass(frozen=True)
class Compressed:
    """One layer after compression.

    `weight` is what engines will multiply with, float32 [out, in]: the base plus the stored delta, decoded
    from what is stored. `size_bytes` is what the layer takes as the method stores it. `encoded` is None for
    methods that no engine of ours serves as a variant: their weight is written out as a whole.
    """

    weight: torch.Tensor
    size_bytes: int
    encoded: Encoded | None = None


@dataclass(frozen=True)
class Method:
    """How to compress a layer.

    `name` and `facts` go into delta.json as they are. `kind` is the variant that engines serve; None: a
    method that others are judged against, which leaves a plain checkpoint. `calibrated` says whether `step`
    needs `Problem.inputs`. `step` raises ValueError for a layer that it cannot code, saying why. `options`
    is what else its results follow from: layers of methods that differ in it are not mixed.
    """

    name: str
    kind: VariantKind | None
    calibrated: bool
    step: Callable[[Problem], Compressed]
    facts: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
