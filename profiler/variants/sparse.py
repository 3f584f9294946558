"""2:4 sparse deltas of 4 or 2 bits (DeltaZip, EuroSys 2025), in our format (docs/formats.md)."""

from __future__ import annotations

from profiler.errors import AdapterError
from profiler.types import ModelSpec
from profiler.variants.delta import Delta, require
from profiler.variants.modules import require_module, total_bytes
from profiler.variants.types import ModuleFacts, SparseManifest, SparseModule

BITS = (4, 2)
COLUMNS = 8  # columns per byte of indices: two groups of four
ALIGNED_COLUMNS = 64  # a GPU loads their bytes at once; if inputs are a multiple of it, groups must be, too


def read(delta: Delta, base: ModelSpec) -> SparseManifest:
    """Check the modules of a sparse delta. Raises CheckpointError or AdapterError."""
    bits: int = require(
        delta.raw.get("bits"), lambda b: type(b) is int and b in BITS, "4 or 2", delta.where, "bits"
    )
    group = delta.raw.get("group_size")
    require(group, _is_group_size, f"null or a multiple of {COLUMNS}", delta.where, "group_size")
    modules = {name: _module(delta, name, base, bits, group) for name in delta.modules}
    parts = {name: (m.values, m.indices, m.scales) for name, m in modules.items()}
    delta.check_all_used(ref for refs in parts.values() for ref in refs)
    facts = ((name, ModuleFacts(total_bytes(refs))) for name, refs in parts.items())
    spec = delta.spec(base, facts, (bits,))
    files = tuple(delta.files.values())
    return SparseManifest(delta.folder, spec, files, modules, full=delta.full, differences=delta.differences)


def group_problem(inputs: int, columns: int) -> str | None:
    """Why engines cannot load a layer with this many inputs if a scale covers this many columns; None if they
    can."""
    if inputs % COLUMNS or inputs % columns:
        return f"which is not a multiple of {COLUMNS} and of its groups ({columns})"
    if columns < inputs and inputs % ALIGNED_COLUMNS == 0 and columns % ALIGNED_COLUMNS:
        return f"in groups of {columns}, but the group size must be a multiple of {ALIGNED_COLUMNS}"
    return None


def _is_group_size(value: object) -> bool:
    return value is None or (type(value) is int and value > 0 and value % COLUMNS == 0)


def _module(delta: Delta, name: str, base: ModelSpec, bits: int, group: int | None) -> SparseModule:
    out, into = require_module(name, base, str(delta.where))
    size = group or into
    if problem := group_problem(into, size):
        raise AdapterError(
            f"{delta.where}: {name} has {into} inputs, {problem}; register the delta with the base that it "
            "was made from, or compress the fine-tune again"
        )
    return SparseModule(
        values=delta.tensor(name, "values", "U8", (out, into // (4 if bits == 4 else 8))),
        indices=delta.tensor(name, "indices", "U8", (out, into // 8)),
        scales=delta.tensor(name, "scales", "F16", (out, into // size)),
        bits=bits,
        group_size=size,
    )
