"""Both launches in CUDA, for batches of few rows: their division and compilation."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from workers.kernels import nvrtc
from workers.kernels.rows import SMALL_BLOCK, Tiles
from workers.kernels.svd_delta import layout
from workers.kernels.svd_delta.plan import MAX_SLICES, Scratch

ARCHITECTURE = "sm_90a"  # the only architecture it was tested on
DTYPES = (torch.bfloat16, torch.float16)
WARPS = 8  # of a block of threads
GROUP = 16  # digits of one product
DIGIT_BYTES = 2 * layout.WORDS + 2 + 2  # in a stage: words, scale and zero point
# The number of blocks of a cluster that share the inputs, by the largest number of panels. It decides the
# order of summation and depends on the layer alone.
PARTS = {48: 1, 112: 2}
MOST_PARTS = 4


@dataclass(frozen=True)
class Shrink:
    """The configuration of `shrink.cu`. `tiles`: tiles of GROUP digits per block of threads."""

    tiles: int
    rows: int
    stages: int
    blocks: int
    kernel: ClassVar[str] = "shrink"
    formats: ClassVar[str] = "PPPPPPqqiiiii"

    @property
    def shared_bytes(self) -> int:
        digits = GROUP * self.tiles
        stages = WARPS * self.stages * (DIGIT_BYTES * digits + 288 * self.rows)
        return _barriers(self.stages) + max(stages, 4 * (WARPS + 1) * self.rows * (digits + 4))

    def options(self, dtype: torch.dtype) -> tuple[str, ...]:
        return _options(dtype, self.rows, self.stages, self.blocks, TILES=self.tiles)


@dataclass(frozen=True)
class Expand:
    """The configuration of `expand.cu`."""

    rows: int
    at_once: int
    stages: int
    blocks: int
    kernel: ClassVar[str] = "expand"
    formats: ClassVar[str] = "PPPPPPqqii"

    @property
    def shared_bytes(self) -> int:
        digits = WARPS * GROUP * self.at_once
        stages = self.stages * (DIGIT_BYTES * digits + (4 * digits + 32) * self.rows)
        return 128 + stages + WARPS * 4 * 8 * (layout.PANEL + 4)

    def options(self, dtype: torch.dtype) -> tuple[str, ...]:
        return _options(dtype, self.rows, self.stages, self.blocks, AT_ONCE=self.at_once)


@dataclass(frozen=True)
class ExpandMany:
    """The configuration of `expand_many.cu`.

    `at_once`: groups of 16 digits per warp and stage. `inner_bytes`: memory for the inner products of at most
    `rows` rows; of fewer rows if a slice has more digits.
    """

    rows: int
    at_once: int
    stages: int
    blocks: int
    inner_bytes: int
    kernel: ClassVar[str] = "expand_many"
    formats: ClassVar[str] = "PPPPPPqqii"

    @property
    def shared_bytes(self) -> int:
        stages = self.stages * WARPS * self.at_once * GROUP * DIGIT_BYTES
        return 256 + WARPS * 4 * 8 * layout.PANEL + self.inner_bytes + stages

    @property
    def most_digits(self) -> int:
        """The most digits of a slice for which the inner products of a row fit."""
        return (self.inner_bytes - 32) // 128 * 32

    def options(self, dtype: torch.dtype) -> tuple[str, ...]:
        more = {"AT_ONCE": self.at_once, "INNER_BYTES": self.inner_bytes}
        return _options(dtype, self.rows, self.stages, self.blocks, **more)


def _barriers(stages: int) -> int:
    return -(-WARPS * stages * 8 // 128) * 128


def _options(dtype: torch.dtype, rows: int, stages: int, blocks: int, **more: int) -> tuple[str, ...]:
    values = {
        "BF16": int(dtype == torch.bfloat16),
        "WARPS": WARPS,
        "ROWS": rows,
        "STAGES": stages,
        "BLOCKS": blocks,
        "FIELDS": layout.PER_SLICE,
        "PLACES": layout.PLACES,
        "MAX_SLICES": MAX_SLICES,
        **more,
    }
    return tuple(f"-D{name}={value}" for name, value in values.items())


@dataclass(frozen=True)
class Cut:
    """The configurations of both launches.

    `panels`: panels of outputs per block of threads of the expand; blocks of `ExpandMany` share all panels.
    """

    shrink: Shrink
    expand: Expand | ExpandMany
    panels: int = 1


_EXPAND = Expand(rows=8, at_once=4, stages=2, blocks=2)
# A shrink has more tiles if there are enough blocks: inputs are copied once for each block.
FEW = Cut(Shrink(tiles=2, rows=8, stages=3, blocks=2), _EXPAND)
# Slower than MORE in batches of 64 rows of 8 variants: for every eight rows of a variant a block fetches
# weights again. By then other blocks' weights have passed through the cache.
_EXPAND_MANY = ExpandMany(rows=8, at_once=3, stages=2, blocks=2, inner_bytes=50 * 1024)
MANY = Cut(Shrink(tiles=4, rows=8, stages=3, blocks=2), _EXPAND_MANY)
# Also for slices with more digits than fit in MANY.
MORE = Cut(Shrink(tiles=8, rows=8, stages=2, blocks=2), _EXPAND, panels=2)
CUTS = (FEW, MANY, MORE)
FEW_ROWS, MANY_ROWS = 4, 32
# For more rows Triton's kernels are about as fast: these take eight rows of a variant at a time.
MOST_ROWS = 64


def cut_for(num_rows: int, most_digits: int) -> Cut:
    """The division for a batch. `most_digits`: of one slice. All divisions sum in the same order: a row's
    result is the same to the bit.
    """
    if num_rows <= FEW_ROWS:
        return FEW
    return MANY if num_rows <= MANY_ROWS and most_digits <= _EXPAND_MANY.most_digits else MORE


def parts_for(inputs: int) -> int:
    panels = -(-inputs // layout.PANEL)
    return next((parts for most, parts in PARTS.items() if panels <= most), MOST_PARTS)


def shrink(
    x: torch.Tensor,  # [T, K]
    arena: torch.Tensor,
    table: torch.Tensor,
    tiles: Tiles,
    cut: Cut,
    scratch: Scratch,
) -> None:
    config, parts = cut.shrink, parts_for(x.shape[1])
    inputs = x if x.stride(1) == 1 else x.contiguous()
    cuts = SMALL_BLOCK // config.rows
    nvrtc.launch(
        compiled(config, x.dtype, x.device.index),
        (scratch.places // (GROUP * config.tiles) * parts, tiles.max_tiles * cuts),
        32 * WARPS,
        (
            scratch.shrunk.data_ptr(),
            inputs.data_ptr(),
            arena.data_ptr(),
            table.data_ptr(),
            tiles.tiles.data_ptr(),
            tiles.order.data_ptr(),
            inputs.stride(0),
            scratch.places,
            x.shape[1],
            table.shape[1] // layout.PER_SLICE,
            parts,
            cuts,
            int(x.shape[1] % 8 == 0 and inputs.stride(0) % 8 == 0 and inputs.data_ptr() % 16 == 0),
        ),
        nvrtc.Dependent(parts),
    )


def expand(
    out: torch.Tensor,  # [T, N]
    arena: torch.Tensor,
    table: torch.Tensor,
    tiles: Tiles,
    slices: Sequence[int],
    cut: Cut,
    scratch: Scratch,
) -> None:
    config = cut.expand
    panels = [-(-outputs // layout.PANEL) for outputs in slices]
    arguments = [
        out.data_ptr(),
        arena.data_ptr(),
        table.data_ptr(),
        tiles.tiles.data_ptr(),
        tiles.order.data_ptr(),
        scratch.shrunk.data_ptr(),
        out.stride(0),
        scratch.places,
    ]
    if isinstance(config, ExpandMany):
        grid = (min(config.blocks * _multiprocessors(out.device), tiles.max_tiles * sum(panels)), 1)
        arguments += [tiles.max_tiles, sum(panels)]
    else:
        cuts = SMALL_BLOCK // config.rows
        grid = (sum(-(-each // cut.panels) for each in panels), tiles.max_tiles * cuts)
        arguments += [cut.panels, cuts]
    nvrtc.launch(
        compiled(config, out.dtype, out.device.index),
        grid,
        32 * (WARPS + 1),  # one of which copies
        (*arguments, len(slices), *slices, *(0,) * (MAX_SLICES - len(slices))),
        nvrtc.Dependent(),
    )


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


@functools.cache
def compiled(config: Shrink | Expand | ExpandMany, dtype: torch.dtype, device: int) -> nvrtc.Kernel:
    """Load the kernel on `device`, which must be the current device; once."""
    formats = (*config.formats, *(() if isinstance(config, Shrink) else (f"{1 + MAX_SLICES}i",)))
    return nvrtc.kernel(
        __package__,
        f"{config.kernel}.cu",
        config.kernel,
        ARCHITECTURE,
        config.options(dtype),
        config.shared_bytes,
        formats,
    )
