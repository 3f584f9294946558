"""From a base and a fine-tuned checkpoint to a compressed delta, layer by layer.

One layer of both checkpoints is in memory at a time. What becomes of one matrix is a `Step`: a calibrated
compressor replaces that function and writes the same format.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from profiler.checkpoint import block_of, read_model
from profiler.errors import AdapterError
from profiler.types import ModelSpec, TensorRef
from profiler.variants.delta import DELTA, FORMAT, FULL_FILE, VERSION, layer_file
from profiler.variants.modules import EMBEDDING, HEAD, require_adaptable
from profiler.variants.reading import read_variant
from profiler.variants.types import SVD_GROUP, VariantKind, VariantLimits, VariantSpec
from profiler.weight_files import locate
from workers.deltas import sparse, svd
from workers.deltas.folders import new_folder
from workers.deltas.tensors import read_tensor
from workers.deltas.writing import NAMES, SafetensorsWriter

TOOL = "ostinato compress"


@dataclass(frozen=True)
class Encoded:
    """One matrix as stored: tensors by part (`values`, `g0.v`, ...), and what delta.json adds for it."""

    parts: Mapping[str, torch.Tensor]
    facts: Mapping[str, Any] = field(default_factory=dict)


Step = Callable[[str, torch.Tensor, torch.Tensor], Encoded]
"""From a module's full name, the base's and the fine-tuned weight (float32 [out, in]) to what is stored."""

Progress = Callable[[float, str], None]
"""Told the share done (0..1) and what is next."""


@dataclass(frozen=True)
class Method:
    """How to compress: `facts` go into delta.json as they are; `name` says there how it was done."""

    kind: VariantKind
    name: str
    facts: Mapping[str, Any]
    step: Step


def sparse_method(bits: int = 4, group_size: int | None = None) -> Method:
    """Magnitude 2:4 pruning and rounding to nearest. `group_size` None: one scale per row."""

    def step(name: str, base: torch.Tensor, tuned: torch.Tensor) -> Encoded:
        return sparse_parts(sparse.encode(tuned - base, bits, group_size))

    facts = {"bits": bits, "group_size": group_size}
    return Method(VariantKind.SPARSE_DELTA, "magnitude-2:4, round to nearest", facts, step)


def svd_method(budget: float = 1 / 16) -> Method:
    """Truncated SVD in 8, 3 and 2 bits; codes take at most `budget` of the matrix in float16."""

    def step(name: str, base: torch.Tensor, tuned: torch.Tensor) -> Encoded:
        delta = tuned - base
        groups = svd.default_groups((delta.shape[0], delta.shape[1]), budget)
        return svd_parts(svd.encode(delta, groups))

    return Method(VariantKind.SVD_DELTA, "svd, round to nearest", {"group_size": SVD_GROUP}, step)


def sparse_parts(code: sparse.SparseCode) -> Encoded:
    return Encoded({"values": code.values, "indices": code.indices, "scales": code.scales})


def svd_parts(groups: tuple[svd.GroupCode, ...]) -> Encoded:
    parts: dict[str, torch.Tensor] = {}
    for number, group in enumerate(groups):
        for side, factor in (("v", group.v), ("u", group.u)):
            parts[f"g{number}.{side}"] = factor.codes
            if factor.scales is not None and factor.zeros is not None:
                parts[f"g{number}.{side}_scales"] = factor.scales
                parts[f"g{number}.{side}_zeros"] = factor.zeros
    return Encoded(parts, {"groups": [{"bits": g.bits, "rank": g.rank} for g in groups]})


def pack(
    base: Path, tuned: Path, out: Path, method: Method, progress: Progress | None = None, device: str = "cpu"
) -> VariantSpec:
    """Write the delta between two checkpoint folders to the new folder `out`, and read it back.

    `device` is where torch computes. Raises CheckpointError when a checkpoint cannot be read, `out` exists
    or cannot be written, AdapterError when the two do not have the same shape or the method cannot code them.
    """
    tell = progress or (lambda share, what: None)
    job = _Job(base, tuned, read_model(base), read_model(tuned), method, device)
    job.check_alike()
    with new_folder(out) as folder:
        for layer in range(job.spec.num_layers):
            tell(layer / (job.spec.num_layers + 1), f"layer {layer} of {job.spec.num_layers}")
            job.write_layer(folder, layer)
        tell(job.spec.num_layers / (job.spec.num_layers + 1), "embedding, last norm and head")
        job.write_rest(folder)
        (folder / DELTA).write_text(json.dumps(job.description(), indent=1))
        made = read_variant(folder, job.spec, VariantLimits(0))
    tell(1.0, "done")
    return made


class _Job:
    """One run of `pack`: the two checkpoints, and what was written so far."""

    def __init__(
        self, base: Path, tuned: Path, spec: ModelSpec, tuned_spec: ModelSpec, method: Method, device: str
    ) -> None:
        self.folders, self.spec, self.tuned_spec = (base, tuned), spec, tuned_spec
        self.method, self.device = method, device
        self.places: tuple[dict[str, TensorRef], dict[str, TensorRef]] = locate(base), locate(tuned)
        self.files: dict[str, Any] = {}
        self.modules: dict[str, Any] = {}
        self.full: dict[str, Any] = {}

    def check_alike(self) -> None:
        """Raises AdapterError unless both have one architecture and shape, and that can have variants; the
        head may be tied or not.
        """
        a, b = self.spec, self.tuned_spec
        require_adaptable(a)
        for what, left, right in (
            ("architecture", a.architecture, b.architecture),
            ("number of layers", a.num_layers, b.num_layers),
            ("shapes of a layer", a.layer_shapes, b.layer_shapes),
            ("shape of the embedding", a.other_shapes[EMBEDDING], b.other_shapes[EMBEDDING]),
        ):
            if left != right:
                raise AdapterError(
                    f"{self.folders[1]} is no fine-tune of {self.folders[0]}: expected the {what} to be "
                    f"{left}, got {right}; give the checkpoint it was fine-tuned from"
                )

    def write_layer(self, folder: Path, layer: int) -> None:
        file, at = layer_file(layer), f"model.layers.{layer}."
        linear = {f"{at}{block_of(m)}.{m}": m for m in self.spec.linear_shapes}
        tensors: dict[str, torch.Tensor] = {}
        for module in linear:
            base, tuned = (t.float().to(self.device) for t in self._both(f"{module}.weight"))
            if not torch.equal(base, tuned):
                encoded = self._encode(module, base, tuned)
                self.modules[module] = {"file": file, **encoded.facts}
                tensors.update({f"{module}.{part}": t for part, t in encoded.parts.items()})
        for name in self.spec.layer_shapes:
            if f"{at}{name}".removesuffix(".weight") not in linear:
                self._add_if_changed(f"{at}{name}", file, tensors)
        self._write(folder, file, tensors)

    def write_rest(self, folder: Path) -> None:
        """The embedding, the last norm, and the head where it is not what the base would make of them."""
        tensors: dict[str, torch.Tensor] = {}
        for name in self.spec.other_shapes:
            if name != HEAD:
                self._add_if_changed(name, FULL_FILE, tensors)
        head = self._head(1)
        follows = self._tensor(1, EMBEDDING) if self.spec.tied else self._tensor(0, HEAD)
        if not _same(follows, head):
            tensors[HEAD] = head
            self.full[HEAD] = {"file": FULL_FILE}
        self._write(folder, FULL_FILE, tensors)

    def description(self) -> dict[str, Any]:
        """delta.json."""
        base = {"architecture": self.spec.architecture, "num_layers": self.spec.num_layers}
        return {
            "format": FORMAT,
            "version": VERSION,
            "kind": self.method.kind.value,
            "method": self.method.name,
            **self.method.facts,
            "base": {"fingerprint": self.spec.fingerprint, **base},
            "tool": TOOL,
            "files": self.files,
            "modules": self.modules,
            "full": self.full,
        }

    def _encode(self, module: str, base: torch.Tensor, tuned: torch.Tensor) -> Encoded:
        try:
            return self.method.step(module, base, tuned)
        except ValueError as error:
            raise AdapterError(f"{module} cannot be compressed: {error}") from error

    def _head(self, which: int) -> torch.Tensor:
        tied = (self.spec, self.tuned_spec)[which].tied
        return self._tensor(which, EMBEDDING if tied else HEAD)

    def _add_if_changed(self, name: str, file: str, tensors: dict[str, torch.Tensor]) -> None:
        base, tuned = self._both(name)
        if not _same(base, tuned):
            tensors[name] = tuned
            self.full[name] = {"file": file}

    def _both(self, name: str) -> tuple[torch.Tensor, torch.Tensor]:
        return self._tensor(0, name), self._tensor(1, name)

    def _tensor(self, which: int, name: str) -> torch.Tensor:
        return read_tensor(self.folders[which], self.places[which][name])

    def _write(self, folder: Path, file: str, tensors: dict[str, torch.Tensor]) -> None:
        if not tensors:
            return
        entries = {name: (NAMES[t.dtype], tuple(t.shape)) for name, t in tensors.items()}
        with SafetensorsWriter(folder / file, entries) as writer:
            for name in writer.order:
                writer.write(name, tensors[name])
        self.files[file] = {"size_bytes": writer.size_bytes, "sha256": writer.sha256}


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a, b) if a.dtype == b.dtype else torch.equal(a.float(), b.float())
