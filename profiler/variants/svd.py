"""Low-rank deltas with singular vectors of mixed precision (Delta-CoMe, DeltaMix), in our format."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from profiler.errors import CheckpointError
from profiler.files import shown
from profiler.types import ModelSpec, TensorRef
from profiler.variants.delta import Delta, require
from profiler.variants.modules import require_module, total_bytes
from profiler.variants.types import (
    SVD_GROUP,
    ModuleFacts,
    SvdFactor,
    SvdGroup,
    SvdManifest,
    SvdModule,
)

BITS = (16, 8, 4, 3, 2)
MAX_GROUPS = 64


def read(delta: Delta, base: ModelSpec) -> SvdManifest:
    """Check the modules of an SVD delta. Raises CheckpointError or AdapterError."""
    group = delta.raw.get("group_size")
    require(
        group, lambda size: type(size) is int and size == SVD_GROUP, str(SVD_GROUP), delta.where, "group_size"
    )
    modules = {name: _module(delta, name, base) for name in delta.modules}
    parts = {name: tuple(_refs(module)) for name, module in modules.items()}
    delta.check_all_used(ref for refs in parts.values() for ref in refs)
    facts = ((name, ModuleFacts(total_bytes(parts[name]), rank=m.rank)) for name, m in modules.items())
    spec = delta.spec(base, facts, (g.bits for m in modules.values() for g in m.groups))
    files = tuple(delta.files.values())
    return SvdManifest(delta.folder, spec, files, modules, full=delta.full, differences=delta.differences)


def _refs(module: SvdModule) -> Iterator[TensorRef]:
    for group in module.groups:
        for factor in (group.v, group.u):
            yield from (ref for ref in (factor.codes, factor.scales, factor.zeros) if ref is not None)


def _module(delta: Delta, name: str, base: ModelSpec) -> SvdModule:
    shape = require_module(name, base, str(delta.where))
    groups = delta.modules[name].get("groups")
    if not isinstance(groups, list) or not 1 <= len(groups) <= MAX_GROUPS:
        raise CheckpointError(
            f"{delta.where}: expected 1 to {MAX_GROUPS} groups of ranks for {name}, got {shown(groups)}"
        )
    made = tuple(_group(delta, name, number, entry, shape) for number, entry in enumerate(groups))
    if sum(group.rank for group in made) > min(shape):
        raise CheckpointError(
            f"{delta.where}: {name} has more ranks than its shape {shape} allows; write the delta again"
        )
    return SvdModule(made)


def _group(delta: Delta, name: str, number: int, entry: Any, shape: tuple[int, int]) -> SvdGroup:
    fields = entry if isinstance(entry, dict) else {}
    bits, rank = fields.get("bits"), fields.get("rank")
    if type(bits) is not int or bits not in BITS or type(rank) is not int or not 1 <= rank <= min(shape):
        raise CheckpointError(
            f"{delta.where}: expected group {number} of {name} to have bits ({', '.join(map(str, BITS))}) "
            f"and a rank from 1 to {min(shape)}, got {shown(entry)}; write the delta again"
        )
    out, into = shape
    v = _factor(delta, name, f"g{number}.v", bits, (rank, into))
    return SvdGroup(bits, rank, v, _factor(delta, name, f"g{number}.u", bits, (rank, out)))


def _factor(delta: Delta, name: str, part: str, bits: int, shape: tuple[int, int]) -> SvdFactor:
    rank, n = shape
    if bits == 16:
        return SvdFactor(delta.tensor(name, part, "F16", shape), None, None)
    per_row = -(-n // SVD_GROUP)
    return SvdFactor(
        delta.tensor(name, part, "U8", (rank, -(-n // 8) * bits)),
        delta.tensor(name, f"{part}_scales", "F16", (rank, per_row)),
        delta.tensor(name, f"{part}_zeros", "U8", (rank, per_row)),
    )
