"""The input and output of a compression method, for one linear layer."""

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
    """Statistics of a layer's inputs X [in, tokens] from calibration: `gram` is X X^T / tokens, float32 [in,
    in].

    They are the layer's inputs when all layers before it are already compressed (DeltaZip, section 4.2: the
    base is added back before the next layer's inputs are computed).
    """

    gram: torch.Tensor
    tokens: int


@dataclass(frozen=True)
class Problem:
    """One linear layer to compress: float32 [out, in] weights, on the compute device.

    `name` is the module's full name (`model.layers.3.self_attn.q_proj`). `inputs` is None if a method needs
    no calibration.
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
        """X X^T / tokens, float32 [in, in]; without calibration the identity: all inputs count equally."""
        if self.inputs is None:
            return torch.eye(self.base.shape[1], device=self.base.device)
        return self.inputs.gram


@dataclass(frozen=True)
class Encoded:
    """One matrix as stored: tensors by part (`values`, `g0.v`, ...), and its facts for delta.json."""

    parts: Mapping[str, torch.Tensor]
    facts: Mapping[str, Any] = field(default_factory=dict)

    @property
    def size_bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in self.parts.values())


@dataclass(frozen=True)
class Compressed:
    """One layer after compression.

    `weight` is what engines will multiply with, float32 [out, in]: the base plus the delta, decoded from the
    stored form. `size_bytes` is the layer's size as the method stores it. `encoded` is None for methods that
    none of our engines serves as a variant: their weight is written out whole.
    """

    weight: torch.Tensor
    size_bytes: int
    encoded: Encoded | None = None


@dataclass(frozen=True)
class Method:
    """How to compress a layer.

    `name` and `facts` go into delta.json unchanged. `kind` is the variant that engines serve; None: a method
    for comparison, which writes a plain checkpoint. `calibrated`: whether `step` needs `Problem.inputs`.
    `step` raises ValueError with the reason for a layer that it cannot code. `options` are the other settings
    that change its results: layers of methods with different options are not mixed.
    """

    name: str
    kind: VariantKind | None
    calibrated: bool
    step: Callable[[Problem], Compressed]
    facts: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
