"""Low-rank deltas in mixed precision (Delta-CoMe, DeltaMix): y += (x V^T) U^T.

V is cut by columns if the input is split, U^T if the output is. Codes share a scale in runs of 128 columns.
If a rank's share begins or ends inside a run, its values are kept as float16 instead. The delta is the same
but takes more memory; this happens only in such a split.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch

from profiler.variants.types import SVD_GROUP, SvdFactor, SvdGroup, SvdManifest, SvdModule
from profiler.variants.verifying import refs_of
from workers.kernels import svd_delta
from workers.kernels.svd_delta import layout
from workers.variants.layer_weights import LayerWeights
from workers.variants.shapes import LayerShape, LinearShape, Slice
from workers.variants.tensors import Files

FLOAT16 = 16


def layer_weights(
    manifest: SvdManifest, files: Files, layer: LayerShape, dtype: torch.dtype
) -> Sequence[LayerWeights]:
    if not isinstance(layer, LinearShape):
        return ()
    modules = [manifest.modules.get(part.name) for part in layer.slices]
    if not any(modules):
        return ()
    ranks = [_ranks(module, part, layer) for module, part in zip(modules, layer.slices, strict=True)]

    def fill(into: Mapping[str, torch.Tensor]) -> None:
        groups = [
            list(_groups(files, module, part, layer)) if module else []
            for module, part in zip(modules, layer.slices, strict=True)
        ]
        layout.pack(groups, into)

    def row(offsets: Mapping[str, int]) -> tuple[int, ...]:
        return layout.describe(ranks, offsets)

    refs = (ref for module in modules if module for ref in refs_of(module))
    parts = layout.parts(layer.in_size, layer.widths, ranks)
    return (LayerWeights(layer.name, "svd_delta", parts, fill, row, files=files.holding(refs)),)


def _ranks(module: SvdModule | None, part: Slice, layer: LinearShape) -> dict[int, int]:
    """The rank, by the bits with which this process holds it."""
    ranks: dict[int, int] = {}
    for group in module.groups if module else ():
        bits = group.bits if _aligned(part, layer) else FLOAT16
        ranks[bits] = ranks.get(bits, 0) + group.rank
    return ranks


def _aligned(part: Slice, layer: LinearShape) -> bool:
    """Whether this rank's share of both factors begins and ends at runs of codes, or at the matrix's end."""
    starts = layer.in_start, part.start
    ends = (layer.in_start + layer.in_size, layer.in_full), (part.start + part.size, part.full)
    return not any(start % SVD_GROUP for start in starts) and all(
        end % SVD_GROUP == 0 or end == full for end, full in ends
    )


def _groups(files: Files, module: SvdModule, part: Slice, layer: LinearShape) -> Iterator[layout.RankGroup]:
    if _aligned(part, layer):
        for group in module.groups:
            v = _coded(files, group, group.v, layer.columns, layer.in_full)
            yield layout.RankGroup(group.bits, v, _coded(files, group, group.u, part.rows, part.full))
        return
    right = torch.cat([_values(files, g, g.v, layer.columns, layer.in_full) for g in module.groups])
    left = torch.cat([_values(files, g, g.u, part.rows, part.full) for g in module.groups])
    yield layout.RankGroup(FLOAT16, layout.Matrix(right.half()), layout.Matrix(left.half()))


def _coded(files: Files, group: SvdGroup, factor: SvdFactor, cut: slice, full: int) -> layout.Matrix:
    """Columns `cut` of a factor [rank, full], as stored."""
    if factor.scales is None or factor.zeros is None:
        return layout.Matrix(files.read(factor.codes, columns=cut))
    runs = slice(cut.start // SVD_GROUP, -(-cut.stop // SVD_GROUP))
    codes = unpacked(files.read(factor.codes), group.bits)[:, :full]
    return layout.Matrix(
        codes[:, cut],
        files.read(factor.scales, columns=runs),
        files.read(factor.zeros, columns=runs),
    )


def _values(files: Files, group: SvdGroup, factor: SvdFactor, cut: slice, full: int) -> torch.Tensor:
    """Columns `cut` of a factor, float32 [rank, columns]."""
    whole = _coded(files, group, factor, slice(0, full), full)
    if whole.scales is None or whole.zeros is None:
        return whole.values.float()[:, cut]
    scales = whole.scales.float().repeat_interleave(SVD_GROUP, 1)[:, :full]
    zeros = whole.zeros.float().repeat_interleave(SVD_GROUP, 1)[:, :full]
    return ((whole.values.float() - zeros) * scales)[:, cut]


def unpacked(stream: torch.Tensor, bits: int) -> torch.Tensor:
    """Codes uint8 [rank, 8 n] from little-endian bit streams [rank, bits n]: 8 codes in `bits` bytes.

    The eight codes are spread over the bytes of one int64, by halves, quarters and eighths.
    """
    if bits == 8:
        return stream
    grouped = stream.unflatten(1, (-1, bits))
    codes: torch.Tensor = grouped[..., 0].to(torch.int64)
    for index in range(1, bits):
        codes |= grouped[..., index].to(torch.int64) << 8 * index
    for count in (4, 2, 1):  # codes that stay together
        kept = sum(((1 << count * bits) - 1) << 8 * count * index for index in range(8 // count))
        codes = codes | codes << count * (8 - bits)
        codes &= kept if kept < 1 << 63 else kept - (1 << 64)
    return codes.view(torch.uint8)


def admit(manifest: SvdManifest, max_rank: int) -> None:
    """Raise ValueError unless scratch memory for `max_rank` singular ranks has room for the delta's ranks.

    A rank that is cut inside a run of codes needs fewer places, not more.
    """
    for name, module in manifest.modules.items():
        ranks: dict[int, int] = {}
        for group in module.groups:
            ranks[group.bits] = ranks.get(group.bits, 0) + group.rank
        try:
            svd_delta.admit([ranks], max_rank)
        except ValueError as e:
            raise ValueError(f"{name}: {e}") from e
