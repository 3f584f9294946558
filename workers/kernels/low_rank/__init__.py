"""The common parts of low-rank operations: two launches, the first of which need not wait for the base's
product.

On a GPU, `shrink` may run on another stream at the same time as the base's own product; only `expand` must
wait for the product. Both use scratch memory, which belongs to one linear at a time: from its shrink to its
expand.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Generic, TypeVar

import torch

from workers.kernels.rows import Rows, Tiles


class Scratch:
    """Device memory for the inner products of one linear at a time; all layers share it."""

    def __init__(self, max_rows: int) -> None:
        self.max_rows = max_rows

    def check_rows(self, x: torch.Tensor) -> None:
        if x.shape[0] > self.max_rows:
            raise ValueError(
                f"expected a batch of at most {self.max_rows} rows, the scratch memory's, got {x.shape[0]}"
            )


P = TypeVar("P")
S = TypeVar("S", bound=Scratch)


@dataclass(frozen=True)
class Shrunk(Generic[P, S]):
    """The state that `shrink` hands to `expand`."""

    num_rows: int
    tiles: Tiles
    plan: P
    scratch: S


@dataclass(frozen=True)
class Operation(Generic[P, S]):
    """A low-rank operation of two launches.

    `package`: its package. `kernel_for` names the module in it with both launches for a plan; without a GPU
    Triton need not be installed. `plan`: chooses the division for tiles, inputs x [T, K] and scratch.
    """

    package: str
    reference: Callable[..., None]
    plan: Callable[[Tiles, torch.Tensor, S], P]
    max_slices: int | None = None
    kernel_for: Callable[[P], str] = lambda plan: "kernel"

    def apply(
        self,
        x: torch.Tensor,  # [T, K]
        out: torch.Tensor,  # [T, N]
        arena: torch.Tensor,
        table: torch.Tensor,
        rows: Rows,
        slices: tuple[int, ...],
        scratch: S,
    ) -> None:
        """Add every variant's product to its rows of `out`; rows of the base do not change."""
        if x.device.type == "cpu":  # without scratch
            check_slices(slices, out, self.max_slices)
            self.reference(x, out, arena, table, rows, slices)
        else:
            self.expand(out, self.shrink(x, arena, table, rows, scratch), arena, table, slices)

    def shrink(
        self,
        x: torch.Tensor,  # [T, K]
        arena: torch.Tensor,
        table: torch.Tensor,
        rows: Rows,
        scratch: S,
    ) -> Shrunk[P, S]:
        """Launch the first kernel: write the inner products, in float32, to scratch."""
        scratch.check_rows(x)
        tiles = rows.tiles(x.shape[0])
        cut = self.plan(tiles, x, scratch)
        self._kernel(cut).shrink(x, arena, table, tiles, cut, scratch)
        return Shrunk(x.shape[0], tiles, cut, scratch)

    def expand(
        self,
        out: torch.Tensor,  # [T, N]
        shrunk: Shrunk[P, S],
        arena: torch.Tensor,
        table: torch.Tensor,
        slices: tuple[int, ...],
    ) -> None:
        """Launch the second kernel: add the products to the outputs."""
        check_slices(slices, out, self.max_slices)
        self._kernel(shrunk.plan).expand(out, arena, table, shrunk.tiles, slices, shrunk.plan, shrunk.scratch)

    def _kernel(self, plan: P) -> ModuleType:
        return importlib.import_module(f"{self.package}.{self.kernel_for(plan)}")


def check_slices(slices: Sequence[int], out: torch.Tensor, most: int | None = None) -> None:
    if sum(slices) != out.shape[1]:
        raise ValueError(
            f"expected slices that add up to the output's {out.shape[1]} columns, got {tuple(slices)}"
        )
    if most is not None and len(slices) > most:
        raise ValueError(f"expected a linear layer of at most {most} slices, got {len(slices)}")


@functools.cache
def dependent_launches(device: torch.device) -> bool:
    """Whether a launch may begin before the launch it depends on has ended (Hopper and later)."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
