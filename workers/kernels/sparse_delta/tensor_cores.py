"""The product on sparse tensor cores (`sbmm.cu`): how it is cut up and launched."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from workers.kernels import nvrtc
from workers.kernels.rows import LARGE_BLOCK, Rows, Tiles
from workers.kernels.sparse_delta import squares
from workers.kernels.sparse_delta.layout import FIELDS

ARCHITECTURE = "sm_90a"  # the only one it was tried on
DTYPES = (torch.bfloat16, torch.float16)
MAX_SLICES = 4
WARPS = 8  # of a block of threads
WEIGHTS = squares.square_bytes(4)  # the larger of the two
ROW_BYTES = 2 * squares.SIDE  # of a square's columns in a row of the batch
PADDED = squares.SIDE + 4
WIDE = 128  # strips of a layer that keep a GPU busy with fewer columns under way in each block of threads


def options(dtype: torch.dtype, **more: int) -> tuple[str, ...]:
    """The compiler's, for a kernel on squares."""
    values = {
        "BF16": int(dtype == torch.bfloat16),
        "WARPS": WARPS,
        "FIELDS": FIELDS,
        "MAX_SLICES": MAX_SLICES,
        **more,
    }
    return tuple(f"-D{name}={value}" for name, value in values.items())


@dataclass(frozen=True)
class Config:
    """What `sbmm.cu` is compiled with."""

    tiles: int
    output_warps: int
    stages: int
    blocks: int

    @property
    def rows(self) -> int:
        return 8 * self.tiles

    @property
    def shared_bytes(self) -> int:
        rings = WARPS * WEIGHTS + WARPS // self.output_warps * self.rows * ROW_BYTES
        return max(self.stages * rings, 4 * WARPS * self.rows * PADDED)

    def options(self, dtype: torch.dtype) -> tuple[str, ...]:
        values = {
            "TILES": self.tiles,
            "OUTPUT_WARPS": self.output_warps,
            "STAGES": self.stages,
            "BLOCKS": self.blocks,
            "WEIGHTS": WEIGHTS,
            "PADDED": PADDED,
        }
        return options(dtype, **values)


MANY_ROWS = Config(tiles=4, output_warps=8, stages=3, blocks=2)
SOME_ROWS = Config(tiles=2, output_warps=1, stages=3, blocks=2)
FEW_ROWS = Config(tiles=1, output_warps=1, stages=4, blocks=2)
FEW_ROWS_WIDE = Config(tiles=1, output_warps=1, stages=3, blocks=3)
CONFIGS = (MANY_ROWS, SOME_ROWS, FEW_ROWS, FEW_ROWS_WIDE)


def config_for(num_rows: int, slices: Sequence[int], block: int) -> Config:
    """All that decoding uses sum in the same order: a row's result is the same to the bit in every batch that
    has small tiles for it."""
    if block == LARGE_BLOCK:
        return MANY_ROWS
    if num_rows > 32:
        return SOME_ROWS
    return FEW_ROWS_WIDE if sum(slices) >= WIDE * squares.SIDE else FEW_ROWS


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
    """Add every row's delta, of those in squares. `config`: instead of `config_for`'s."""
    if len(slices) > MAX_SLICES:
        raise ValueError(f"{len(slices)} slices in a layer; expected at most {MAX_SLICES}.")
    num_rows = x.shape[0]
    if num_rows == 0:
        return
    inputs = x if x.stride(1) == 1 and x.stride(0) % 8 == 0 and x.data_ptr() % 16 == 0 else x.contiguous()
    for tiles in rows.tiles_by_count(num_rows):
        chosen = config or config_for(tiles.num_rows, slices, tiles.block)
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
    groups = sum(-(-outputs // (squares.SIDE * config.output_warps)) for outputs in slices)
    nvrtc.launch(
        compiled(config, x.dtype, x.device.index),
        (tiles.max_tiles * cuts, groups),
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
    """Loaded on `device`, the current one; once."""
    formats = (*"PPPPPPqqiii", SLICES_FORMAT)
    options = config.options(dtype)
    return nvrtc.kernel(__package__, "sbmm.cu", "sbmm", ARCHITECTURE, options, config.shared_bytes, formats)
