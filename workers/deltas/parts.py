"""A coded matrix as the named tensors of docs/formats.md, and back.

`facts` are a module's entries in delta.json; numbers that all modules share (`bits` of 2:4 codes) are not in
it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from workers.deltas import sparse, svd

Parts = dict[str, torch.Tensor]
Facts = dict[str, Any]


def sparse_parts(code: sparse.SparseCode) -> tuple[Parts, Facts]:
    """The parts of a 2:4 code; it has no facts of its own."""
    return {"values": code.values, "indices": code.indices, "scales": code.scales}, {}


def sparse_code(parts: Mapping[str, torch.Tensor], bits: int) -> sparse.SparseCode:
    """The inverse of `sparse_parts`."""
    return sparse.SparseCode(parts["values"], parts["indices"], parts["scales"], bits)


def svd_parts(groups: Sequence[svd.GroupCode]) -> tuple[Parts, Facts]:
    """The parts of a low-rank code, `g0.v` and so on, and its groups' widths and ranks as facts."""
    parts: Parts = {}
    for number, group in enumerate(groups):
        for side, factor in (("v", group.v), ("u", group.u)):
            at = f"g{number}.{side}"
            parts[at] = factor.codes
            if factor.scales is not None and factor.zeros is not None:
                parts[f"{at}_scales"], parts[f"{at}_zeros"] = factor.scales, factor.zeros
    return parts, {"groups": [{"bits": group.bits, "rank": group.rank} for group in groups]}


def svd_code(parts: Mapping[str, torch.Tensor], facts: Mapping[str, Any]) -> tuple[svd.GroupCode, ...]:
    """The inverse of `svd_parts`."""

    def factor(at: str) -> svd.FactorCode:
        return svd.FactorCode(parts[at], parts.get(f"{at}_scales"), parts.get(f"{at}_zeros"))

    return tuple(
        svd.GroupCode(group["bits"], group["rank"], factor(f"g{number}.v"), factor(f"g{number}.u"))
        for number, group in enumerate(facts["groups"])
    )
