"""One variant's merged weights in place of the base's weights, while the variant runs alone.

Its steps are then the base's: they use the base's graphs and cost as much as a merged model's steps. No
kernel that reads a delta in addition to the weights is as fast. It takes a second copy of the base's weights.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from workers.kernels import full
from workers.kernels.bias import layout as bias_layout
from workers.kernels.full import layout as full_layout
from workers.kernels.sparse_delta import in_squares, merging
from workers.kernels.types import Part, aligned, view
from workers.variants.alone import BASE_UID
from workers.variants.device import DeviceMemory
from workers.variants.host import TableKey
from workers.variants.layer_context import LayerContext
from workers.variants.merged_product import PlainWeight
from workers.variants.shapes import LayerShape, LinearShape, NormShape
from workers.variants.warming import Hooked

log = logging.getLogger(__name__)

# The operations that a merged variant may have, and the one that it must have.
OPERATIONS = frozenset({"sparse_delta", "norm", "embedding", "head", "bias"})
NEEDED = "sparse_delta"
FETCHED_BYTES = 16 << 20  # of a difference in host memory, added in one go


@dataclass(frozen=True)
class Linear:
    """A weight [out, in], into which a delta is merged; `base`: a copy of the base's weight."""

    weight: torch.Tensor
    base: torch.Tensor
    context: LayerContext
    slices: tuple[int, ...]

    def merge(self, slot: int) -> None:
        table = self.context.tables["sparse_delta"]
        layer = merging.Layer(self.base, self.context.arena, table, self.slices)
        merging.merge(self.weight, layer, slot)


@dataclass(frozen=True)
class Whole:
    """A tensor that a variant may replace: a norm, a bias, the first rows of the embedding or the head.

    `keys`: the tables with the replacement; several if layers share the tensor. `dtype`: the replacement's
    type. `through`: uint8 [bytes] of the device, a buffer for differences that come from host memory.
    """

    weight: torch.Tensor
    base: torch.Tensor
    keys: tuple[TableKey, ...]
    dtype: torch.dtype
    through: torch.Tensor

    def merge(self, slot: int, memory: DeviceMemory) -> None:
        count, at, *scales_at = memory.fields(slot, self.keys[0])
        rows = self._rows(count)
        self.weight[rows:].copy_(self.base[rows:])
        if count and any(scales_at):
            self._add(slot, memory, count, at, scales_at[0])
        elif count:
            memory.copy_to(self.weight[:rows], slot, self._part(count), at)
            if self._is_bias:  # NaN where a part keeps the base's bias
                self.weight.copy_(torch.where(self.weight.isnan(), self.base, self.weight))

    def _add(self, slot: int, memory: DeviceMemory, count: int, at: int, scales_at: int) -> None:
        """Add a difference to the base's tensor. From host memory its codes are copied some rows at a
        time.
        """
        width = self.weight.shape[1]
        part, of_scales = full_layout.difference_parts(count, width)
        codes, scales = memory.in_arena(slot, part, at), memory.in_arena(slot, of_scales, scales_at)
        if codes is not None and scales is not None:
            full.add(self.base[:count], codes, scales, self.weight[:count])
            return
        scales = view(self.through, of_scales, 0)
        memory.copy_to(scales, slot, of_scales, scales_at)
        taken = aligned(of_scales.size_bytes)
        for some in _some_rows(count, (self.through.numel() - taken) // width):
            part, _ = full_layout.difference_parts(some.stop - some.start, width)
            codes = view(self.through, part, taken)
            memory.copy_to(codes, slot, part, at + some.start * width)
            full.add(self.base[some], codes, scales[some], self.weight[some])

    def _rows(self, count: int) -> int:
        return count if self.weight.ndim == 2 or not count else len(self.weight)

    @property
    def _is_bias(self) -> bool:
        return self.keys[0][1] == "bias"

    def _part(self, count: int) -> Part:
        if self._is_bias:
            (part,) = bias_layout.parts(len(self.weight))
        else:
            (part,) = full_layout.parts(count, self.weight.shape[-1], self.dtype)
        return part

    def fits(self, slot: int, memory: DeviceMemory) -> bool:
        """Whether the variant can be merged here: layers that share a tensor must have the same
        replacement.
        """
        return len({tuple(memory.fields(slot, key)) for key in self.keys}) == 1


class MergedSlot:
    """The memory of the base's weights, which one variant's merged weights may replace. Not thread-safe.

    `holds`: the variant whose weights it has now, BASE_UID for the base's own, None after a failure. A uid is
    never given to another variant.
    """

    def __init__(
        self,
        linears: Sequence[Linear],
        wholes: Sequence[Whole],
        unbiased: Collection[TableKey],
        memory: DeviceMemory,
    ) -> None:
        """`unbiased`: the bias tables of layers where the base has no bias."""
        self._linears, self._wholes, self._unbiased, self._memory = linears, wholes, unbiased, memory
        self._pairs = [(held.weight, held.base) for held in linears]
        self._pairs += [(held.weight, held.base) for held in wholes]
        self._fits: dict[int, tuple[int, bool]] = {}  # by slot: the variant and whether it fits
        self.holds: int | None = BASE_UID
        self._beside = torch.cuda.Stream(memory.arena.device) if memory.arena.is_cuda else None

    @property
    def size_bytes(self) -> int:
        """The bytes of the copy of the base's weights."""
        return sum(base.nbytes for _, base in self._pairs)

    def takes(self, uid: int, slot: int, operations: Collection[str]) -> bool:
        """Whether a variant can be merged: a sparse delta, in tensors that the base has, too."""
        if NEEDED not in operations or not OPERATIONS.issuperset(operations):
            return False
        known, fits = self._fits.get(slot, (BASE_UID, False))
        if known != uid:
            with self._memory.layout:
                fits = self._all_fit(slot)
            self._fits[slot] = uid, fits
        return fits

    def _all_fit(self, slot: int) -> bool:
        adds_bias = any(self._memory.fields(slot, key)[0] for key in self._unbiased)
        return not adds_bias and all(whole.fits(slot, self._memory) for whole in self._wholes)

    def merge(self, uid: int, slot: int) -> None:
        """Merge the variant in `slot` into the base's weights, whatever they hold now.

        Steps that were launched before are not affected: this runs on the device after them.
        """
        self.holds = None
        with self._memory.layout:  # until all of it is queued in the order of steps
            self._merge(slot)
        self.holds = uid

    def _merge(self, slot: int) -> None:
        try:
            with self._wholes_beside():  # meanwhile an embedding comes from host memory
                for whole in self._wholes:
                    whole.merge(slot, self._memory)
            for linear in self._linears:
                linear.merge(slot)
        finally:  # later work comes after all of it, also if a part failed
            if self._beside is not None:
                torch.cuda.current_stream(self._beside.device).wait_stream(self._beside)

    def _wholes_beside(self) -> AbstractContextManager[Any]:
        """Within the context, the device's work runs after earlier work, and concurrently with later work."""
        if self._beside is None:
            return nullcontext()
        self._beside.wait_stream(torch.cuda.current_stream(self._beside.device))
        return torch.cuda.stream(self._beside)

    def restore(self) -> None:
        """Restore the base's own weights, bit for bit."""
        self.holds = None
        for weight, base in self._pairs:
            weight.copy_(base)
        self.holds = BASE_UID


def make(hooked: Iterable[Hooked], memory: DeviceMemory, dtype: torch.dtype) -> MergedSlot | None:
    """Make a merged slot for the layers of a model, and copy their weights now. Raises
    torch.OutOfMemoryError.

    Returns None, and logs the reason, if a weight is packed, quantised or not `dtype`.
    """
    layers = list(hooked)
    found: list[tuple[torch.Tensor, LayerContext, LinearShape]] = []
    for module, shape, context in layers:
        if not isinstance(shape, LinearShape):
            continue
        weight = PlainWeight(module, shape).of(dtype)
        if weight is None or not _can_merge(shape, weight):
            log.warning("no merged slot: deltas cannot be merged into the weight of %s", shape.name)
            return None
        found.append((weight, context, shape))
    linears = [Linear(weight, weight.clone(), context, shape.widths) for weight, context, shape in found]
    unbiased = [
        (shape.name, "bias")
        for module, shape, _ in layers
        if isinstance(shape, LinearShape) and getattr(module, "bias", None) is None
    ]
    made = MergedSlot(linears, list(_wholes(layers, dtype)), unbiased, memory)
    log.info(
        "a delta that runs alone is merged into a copy of the base's weights of %d bytes", made.size_bytes
    )
    return made


def _can_merge(shape: LinearShape, weight: torch.Tensor) -> bool:
    """Whether deltas can be merged into the weight; on a CPU torch merges them from any layout."""
    merges = weight.device.type == "cpu" or in_squares(shape.in_size, shape.widths, weight.dtype)
    return merges and weight.is_contiguous()


def _wholes(layers: Sequence[Hooked], dtype: torch.dtype) -> Iterator[Whole]:
    keys: dict[int, list[TableKey]] = {}
    tensors: dict[int, torch.Tensor] = {}
    for module, shape, context in layers:
        for op, tensor in _replaceable(module, shape):
            if op in context.tables:
                keys.setdefault(tensor.data_ptr(), []).append((shape.name, op))
                tensors[tensor.data_ptr()] = tensor
    tables = [tensor for tensor in tensors.values() if tensor.ndim == 2]
    through = torch.empty(0, dtype=torch.uint8)
    if tables:
        scales = [full_layout.difference_parts(*table.shape)[1] for table in tables]
        size = FETCHED_BYTES + max(aligned(part.size_bytes) for part in scales)
        through = torch.empty(size, dtype=torch.uint8, device=tables[0].device)
    for table in tables:
        _compile_adding(table)
    for at, tensor in tensors.items():
        yield Whole(tensor, tensor.clone(), tuple(keys[at]), dtype, through)


def _some_rows(count: int, most: int) -> Iterator[slice]:
    """Slices of at most `most` rows whose scales begin at a multiple of 16 bytes, as the compiled kernel
    requires.
    """
    step = most // 16 * 16 or most
    yield from (slice(start, min(count, start + step)) for start in range(0, count, step))


def _compile_adding(tensor: torch.Tensor) -> None:
    """Compile the kernel now, and not while a request waits."""
    some = tensor[:1]
    zeros = torch.zeros(1, dtype=torch.float32, device=tensor.device)
    full.add(some, torch.zeros_like(some, dtype=torch.int8), zeros, torch.empty_like(some))


def _replaceable(module: Any, shape: LayerShape) -> Iterator[tuple[str, torch.Tensor]]:
    match shape:
        case LinearShape():
            if getattr(module, "bias", None) is not None:
                yield "bias", module.bias.data
        case NormShape():
            yield "norm", module.weight.data
        case _:
            yield ("head" if shape.is_head else "embedding"), module.weight.data
