"""One module's weight with a variant applied: the reference for an engine's computation."""

from __future__ import annotations

from collections.abc import Callable

import torch

from profiler.types import TensorRef
from profiler.variants.types import BoftModule, LoraModule, SparseModule, SvdFactor, SvdModule
from workers.deltas import boft, sparse, svd

Module = LoraModule | BoftModule | SparseModule | SvdModule
Read = Callable[[TensorRef], torch.Tensor]


def merged_weight(weight: torch.Tensor, module: Module, read: Read) -> torch.Tensor:
    """W' [out, in] for W [out, in], in float64; `read` reads the variant's tensors."""
    if isinstance(module, BoftModule):
        return boft.rotate_weight(weight, read(module.r), read(module.s))
    return weight.double() + delta(module, (weight.shape[0], weight.shape[1]), read)


def delta(module: LoraModule | SparseModule | SvdModule, shape: tuple[int, int], read: Read) -> torch.Tensor:
    """The variant's addition to W [out, in]: float64 for LoRA, else float32."""
    match module:
        case LoraModule(a=a, b=b, scaling=scaling):
            return scaling * (read(b).double() @ read(a).double())
        case SparseModule(values=values, indices=indices, scales=scales, bits=bits):
            return sparse.decode(sparse.SparseCode(read(values), read(indices), read(scales), bits))
        case SvdModule(groups=groups):
            coded = (svd.GroupCode(g.bits, g.rank, _factor(g.v, read), _factor(g.u, read)) for g in groups)
            return svd.decode(tuple(coded), shape)


def _factor(factor: SvdFactor, read: Read) -> svd.FactorCode:
    scales = None if factor.scales is None else read(factor.scales)
    zeros = None if factor.zeros is None else read(factor.zeros)
    return svd.FactorCode(read(factor.codes), scales, zeros)
