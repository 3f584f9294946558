"""Launches of the product on sparse tensor cores, for few rows of a variant and for many."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch

from workers.kernels import nvrtc
from workers.kernels.rows import LARGE_BLOCK, LARGE_FROM, Rows, Tiles, batch_invariant
from workers.kernels.sparse_delta import squares
from workers.kernels.sparse_delta.layout import FIELDS

ARCHITECTURE = "sm_90a"  # the only architecture it was tested on
DTYPES = (torch.bfloat16, torch.float16)
MAX_SLICES = 4
WARPS = 8  # of a block of threads
WEIGHTS = squares.square_bytes(4)  # the larger of the two
ROW_BYTES = 2 * squares.SIDE  # of a square's columns in a row of the batch
PADDED = squares.SIDE + 4
WIDE = 128  # strips of a layer that keep a GPU busy with fewer columns in flight per block of threads


def options(dtype: torch.dtype, **more: int) -> tuple[str, ...]:
    """The compiler's options, for a kernel on squares."""
    values = {
        "BF16": int(dtype == torch.bfloat16),
        "WARPS": WARPS,
        "FIELDS": FIELDS,
        "MAX_SLICES": MAX_SLICES,
        **more,
    }
    return tuple(f"-D{name}={value}" for name, value in values.items())


class Config(Protocol):
    """The parameters that a kernel is compiled with."""

    def __hash__(self) -> int: ...

    @property
    def kernel(self) -> str:
        """The kernel's name, and the name of its file."""

    @property
    def rows(self) -> int:
        """The most rows of one variant that a block of threads takes."""

    @property
    def outputs(self) -> int:
        """The outputs of a slice that a block of threads computes."""

    @property
    def parts(self) -> int:
        """The number of blocks that share the inputs."""

    @property
    def shared_bytes(self) -> int: ...

    def options(self, dtype: torch.dtype) -> tuple[str, ...]:
        """The compiler's options."""


@dataclass(frozen=True)
class Few:
    """`sbmm.cu`."""

    tiles: int
    stages: int
    blocks: int
    kernel: ClassVar[str] = "sbmm"
    outputs: ClassVar[int] = squares.SIDE
    parts: ClassVar[int] = 1

    @property
    def rows(self) -> int:
        return 8 * self.tiles

    @property
    def shared_bytes(self) -> int:
        return max(self.stages * WARPS * (WEIGHTS + self.rows * ROW_BYTES), 4 * WARPS * self.rows * PADDED)

    def options(self, dtype: torch.dtype) -> tuple[str, ...]:
        return _options(dtype, TILES=self.tiles, STAGES=self.stages, BLOCKS=self.blocks)


@dataclass(frozen=True)
class Many:
    """`sbmm_many.cu`."""

    parts: int
    stages: int
    kernel: ClassVar[str] = "sbmm_many"
    rows: ClassVar[int] = LARGE_BLOCK
    outputs: ClassVar[int] = WARPS * squares.SIDE

    @property
    def shared_bytes(self) -> int:
        return max(self.stages * (WARPS * WEIGHTS + self.rows * ROW_BYTES), 4 * WARPS * self.rows * PADDED)

    def options(self, dtype: torch.dtype) -> tuple[str, ...]:
        return _options(dtype, ROWS=self.rows, PARTS=self.parts, STAGES=self.stages)


def _options(dtype: torch.dtype, **more: int) -> tuple[str, ...]:
    return options(dtype, WEIGHTS=WEIGHTS, PADDED=PADDED, **more)


# From this many rows of a step on, a variant with more than FEW_ROWS has large tiles. Their launch takes 2 us
# if no variant has that many rows.
MANY_FROM = 64
PARTS = (1, 2, 4)
MANY_ROWS = {parts: Many(parts, stages=7) for parts in PARTS}
MULTIPROCESSORS = 132  # of an H100 and an H200; a block for many rows occupies one
# Microseconds of such a block on an H200: per square, and a fixed part, alone and in a cluster.
SQUARE_US = 0.62
ALONE_US, CLUSTER_US = 5, 9
SOME_ROWS = Few(tiles=2, stages=3, blocks=2)
FEW_ROWS = Few(tiles=1, stages=4, blocks=2)
FEW_ROWS_WIDE = Few(tiles=1, stages=3, blocks=3)
CONFIGS: tuple[Config, ...] = (*MANY_ROWS.values(), SOME_ROWS, FEW_ROWS, FEW_ROWS_WIDE)


def config_for(num_rows: int, inputs: int, slices: Sequence[int], block: int) -> Config:
    """Choose the configuration of a launch.

    All configurations for small tiles sum in the same order: a row's result is the same to the bit in every
    batch that has small tiles for it. For many rows of a variant the order depends on the batch's rows, too.

    During a prefill small tiles belong to variants that decode, and most of these have few rows. In
    batch-invariant mode all tiles are small.
    """
    if block == LARGE_BLOCK:
        return _for_many(-(-num_rows // LARGE_BLOCK), inputs // squares.SIDE, tuple(slices))
    if num_rows > 32 and (num_rows < LARGE_FROM or batch_invariant()):
        return SOME_ROWS
    return FEW_ROWS_WIDE if sum(slices) >= WIDE * squares.SIDE else FEW_ROWS


@functools.cache
def _for_many(tiles: int, across: int, slices: tuple[int, ...]) -> Many:
    """The number of parts with the shortest time, for `tiles` tiles of rows and `across` squares along the
    inputs.

    More parts keep more of the GPU busy, until blocks have to wait for one another.
    """

    def us(config: Many) -> float:
        blocks = tiles * _groups(config, slices) * config.parts
        each = across / config.parts * SQUARE_US + (ALONE_US if config.parts == 1 else CLUSTER_US)
        return -(-blocks // MULTIPROCESSORS) * each

    return min(MANY_ROWS.values(), key=us)


def _groups(config: Config, slices: Sequence[int]) -> int:
    """The number of groups of a layer's outputs; no group crosses slices."""
    return sum(-(-outputs // config.outputs) for outputs in slices)


SLICES_FORMAT = f"{1 + MAX_SLICES}i"


def slices_argument(slices: Sequence[int]) -> tuple[int, ...]:
    """The values of `Slices` of squares.cuh."""
    return (len(slices), *slices, *(0,) * (MAX_SLICES - len(slices)))


def apply(
    x: torch.Tensor,  # [M, K]
    out: torch.Tensor,  # [M, sum(slices)]
    arena: torch.Tensor,
    table: torch.Tensor,
    rows: Rows,
    slices: Sequence[int],
    config: Config | None = None,
) -> None:
    """Add every row's delta, for deltas in squares. `config`: replaces the choice of `config_for`."""
    if len(slices) > MAX_SLICES:
        raise ValueError(f"expected at most {MAX_SLICES} slices in a layer, got {len(slices)}")
    num_rows = x.shape[0]
    if num_rows == 0:
        return
    inputs = x if x.stride(1) == 1 and x.stride(0) % 8 == 0 and x.data_ptr() % 16 == 0 else x.contiguous()
    for tiles in rows.tiles_by_count(num_rows, MANY_FROM):
        chosen = config or config_for(tiles.num_rows, x.shape[1], slices, tiles.block)
        _launch(inputs, out, arena, table, tiles, slices, chosen)


def _launch(
    x: torch.Tensor,
    out: torch.Tensor,
    arena: torch.Tensor,
    table: torch.Tensor,
    tiles: Tiles,
    slices: Sequence[int],
    config: Config,
) -> None:
    cuts = -(-tiles.block // config.rows)
    groups = _groups(config, slices)
    nvrtc.launch(
        compiled(config, x.dtype, x.device.index),
        (tiles.max_tiles * cuts * config.parts, groups),
        32 * WARPS,
        (
            out.data_ptr(),
            x.data_ptr(),
            arena.data_ptr(),
            table.data_ptr(),
            tiles.tiles.data_ptr(),
            tiles.order.data_ptr(),
            out.stride(0),
            x.stride(0),
            x.shape[1],
            table.shape[1],
            cuts,
            *slices_argument(slices),
        ),
    )


@functools.cache
def compiled(config: Config, dtype: torch.dtype, device: int) -> nvrtc.Kernel:
    """Load the kernel on `device`, which must be the current device; once."""
    formats = (*"PPPPPPqqiii", SLICES_FORMAT)
    return nvrtc.kernel(
        __package__,
        f"{config.kernel}.cu",
        config.kernel,
        ARCHITECTURE,
        config.options(dtype),
        config.shared_bytes,
        formats,
    )
