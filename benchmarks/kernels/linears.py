"""The shared parts of benchmarks of operations that add to a linear's output."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Generic, TypeVar

import torch

from benchmarks.kernels.harness import Case, Contender, Int32s, Labels, Prepared, Shape, slots_for

DTYPE = torch.bfloat16
T = TypeVar("T")


@dataclass(frozen=True)
class Layer(Generic[T]):
    """One copy of the arguments, as one layer of a model has them. `weights` are for the computation of the
    expected result."""

    x: torch.Tensor
    y: torch.Tensor
    out: torch.Tensor
    table: torch.Tensor
    weights: T


def layer(
    shape: Shape, num_rows: int, table: Sequence[Sequence[int]], weights: T, device: torch.device
) -> Layer[T]:
    x = torch.randn(num_rows, shape.inputs, device=device, dtype=DTYPE)
    y = torch.randn(num_rows, shape.outputs, device=device, dtype=DTYPE)
    return Layer(x, y, y.clone(), torch.tensor(table, device=device), weights)


def contender(
    name: str,
    layers: Sequence[Layer[T]],
    launch: Callable[[Layer[T]], object],
    scratch: Sequence[torch.Tensor] = (),
) -> Contender:
    """Adds to each layer's `out`, which begins as `y`; `scratch` is floating point, and poisoned."""

    def reset(copy: int) -> None:
        layers[copy].out.copy_(layers[copy].y)
        for each in scratch:
            each.fill_(float("nan"))

    return Contender(name, lambda copy: launch(layers[copy]), lambda copy: layers[copy].out, reset)


def case(
    labels: Labels,
    prepare: Callable[[Int32s, torch.device], Prepared],
    variants: int,
    urgent: bool = False,
) -> Case:
    """The rows are spread over the variants as the labels' batch and distribution say."""
    slots = slots_for(str(labels["distribution"]), int(labels["batch"]), variants)
    return Case(labels, partial(prepare, slots), urgent)


def indices(slots: Int32s, variants: int, device: torch.device) -> list[torch.Tensor]:
    """int64, the rows of each variant."""
    return [torch.from_numpy((slots == slot).nonzero()[0]).to(device) for slot in range(variants)]
