"""An ostinato-delta folder (docs/formats.md), written layer by layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from profiler.files import is_file
from profiler.variants.delta import (
    ADDED_ROWS,
    ADDED_ROWS_FILE,
    CODES,
    DELTA,
    DIFFERENCE_BITS,
    DIFFERENCE_VERSION,
    DIFFERENCES,
    FORMAT,
    FULL_FILE,
    SCALES,
    VERSION,
    layer_file,
)
from profiler.variants.modules import require_adaptable
from profiler.variants.reading import read_variant
from profiler.variants.side_files import GENERATION, generation_file, side_files
from profiler.variants.types import VariantKind, VariantLimits, VariantSpec
from profiler.weight_files import locate_in
from workers.compression.artefacts import Stored, same
from workers.compression.durable import Entry, held, write_bytes, write_json, write_tensors
from workers.compression.layout import added_rows
from workers.compression.records import PartRecord
from workers.compression.sources import Source
from workers.compression.types import Compressed, Method, Problem
from workers.deltas import differences, sparse, svd
from workers.deltas.parts import sparse_code, svd_code
from workers.deltas.tensors import read_tensor

TOOL = "ostinato compress"


class DeltaArtefact:
    """Stores codes of layers that differ from the base's, and whole tensors that differ.

    Raises AdapterError for a base whose variants no engine serves.
    """

    def __init__(self, base: Source, tuned: Source, method: Method) -> None:
        require_adaptable(base.spec)
        self._base, self._tuned, self._method = base, tuned, method
        self._spec = base.spec

    def file_name(self, part: int) -> str:
        return layer_file(part) if part < self._spec.num_layers else FULL_FILE

    def store(self, problem: Problem, compressed: Compressed, dtype: torch.dtype) -> Stored:
        if compressed.encoded is None:
            raise ValueError(f"{self._method.name} makes no code of a {self._method.kind}")
        parts, facts = compressed.encoded.parts, compressed.encoded.facts
        tensors = {f"{problem.name}.{part}": tensor for part, tensor in parts.items()}
        return Stored(tensors, facts, self._weight(problem.base, parts, facts))

    def restore(self, problem: Problem, facts: Mapping[str, Any], file: Path) -> torch.Tensor:
        at = f"{problem.name}."
        parts = {
            name.removeprefix(at): read_tensor(file.parent, ref).to(problem.base.device)
            for name, ref in locate_in(file.parent, file.name).items()
            if name.startswith(at)
        }
        return self._weight(problem.base, parts, facts)

    def unchanged(self, name: str, weight: torch.Tensor) -> Mapping[str, torch.Tensor]:
        return {}

    def whole(self, name: str) -> Mapping[str, Entry]:
        tuned = self._tuned.tensor(name)
        return {} if same(self._base.tensor(name), tuned) else {name: held(tuned)}

    def rest(self) -> Mapping[str, Entry]:
        """The embedding, the last norm, and the head, if they differ from the base's."""
        head = self._spec.head
        found: dict[str, Entry] = {}
        for name in (*(name for name in self._spec.other_shapes if name != head), head):
            own = self._known_rows(name)
            tied = name == head and self._spec.tied
            if same(self._known_rows(self._spec.embedding) if tied else self._base.tensor(name), own):
                continue
            if own.ndim == 2 and differences.keeps(self._base.tensor(name), own):
                found |= self._difference(name, tuple(own.shape))
            else:
                found[name] = Entry(own.dtype, tuple(own.shape), partial(self._known_rows, name))
        return found

    def _difference(self, name: str, shape: tuple[int, ...]) -> dict[str, Entry]:
        def encoded(number: int) -> torch.Tensor:
            return differences.encode(self._base.tensor(name), self._known_rows(name))[number]

        return {
            f"{name}{CODES}": Entry(torch.int8, shape, partial(encoded, 0)),
            f"{name}{SCALES}": Entry(torch.float32, shape[:1], partial(encoded, 1)),
        }

    def finish(self, folder: Path, records: Sequence[PartRecord], notes: Mapping[str, Any]) -> int:
        added = self._added_rows()
        where = {}
        if added:
            file = write_tensors(folder / ADDED_ROWS_FILE, added)
            size = {"size_bytes": file.size_bytes, "sha256": file.sha256}
            where = {ADDED_ROWS: {"file": file.name, **size}}
        contents = _contents(records)
        version = {"version": DIFFERENCE_VERSION} if DIFFERENCES in contents else {}
        document = {**self._head(), **version, **notes, **where, **contents}
        write_json(folder / DELTA, document, indent=1)
        self._write_words(folder)
        self.spec(folder)
        return sum(entry.size_bytes for entry in added.values())

    def _write_words(self, folder: Path) -> None:
        """Copy the tokenizer, template, end tokens and generation defaults that differ from the base's."""
        own, base = self._tuned.origin, self._base.folder
        for name in side_files(own):
            contents = (own / name).read_bytes()
            if not is_file(base / name) or (base / name).read_bytes() != contents:
                write_bytes(folder / name, contents)
        if (generation := generation_file(own, base)) is not None:
            write_json(folder / GENERATION, generation)

    def spec(self, folder: Path) -> VariantSpec:
        return read_variant(folder, self._spec, VariantLimits(0))

    def _head(self) -> dict[str, Any]:
        spec = self._spec
        base = {"architecture": spec.architecture, "num_layers": spec.num_layers}
        return {
            "format": FORMAT,
            "version": VERSION,
            "kind": str(self._method.kind),
            "method": self._method.name,
            **self._method.facts,
            "base": {"fingerprint": spec.fingerprint, **base},
            "tool": TOOL,
        }

    def _known_rows(self, name: str) -> torch.Tensor:
        """A tensor outside the layers, without the rows of tokens that the base does not have."""
        shapes = self._spec.other_shapes
        return self._tuned.tensor(name)[: shapes.get(name, shapes[self._spec.embedding])[0]]

    def _added_rows(self) -> dict[str, Entry]:
        """The rows of tokens that the base does not have, of the embedding and of a head that is not tied."""
        count, tuned = added_rows(self._spec, self._tuned.spec), self._tuned
        if not count:
            return {}
        names = (tuned.spec.embedding,) if tuned.spec.tied else (tuned.spec.embedding, tuned.spec.head)
        return {name: held(tuned.tensor(name)[-count:].clone()) for name in names}

    def _weight(
        self, base: torch.Tensor, parts: Mapping[str, torch.Tensor], facts: Mapping[str, Any]
    ) -> torch.Tensor:
        """The base plus the decoded parts."""
        if self._method.kind is VariantKind.SPARSE_DELTA:
            return base + sparse.decode(sparse_code(parts, self._method.facts["bits"]))
        return base + svd.decode(svd_code(parts, facts), (base.shape[0], base.shape[1]))


def _contents(records: Sequence[PartRecord]) -> dict[str, Any]:
    """The entries of delta.json for files, modules and whole tensors."""
    files: dict[str, Any] = {}
    modules: dict[str, Any] = {}
    full: dict[str, Any] = {}
    changed: dict[str, Any] = {}
    for record in records:
        if (file := record.file) is not None:
            files[file.name] = {"size_bytes": file.size_bytes, "sha256": file.sha256}
            modules |= {name: {"file": file.name, **module.facts} for name, module in record.modules.items()}
            coded = {name.removesuffix(CODES) for name in record.whole if name.endswith(CODES)}
            changed |= {name: {"file": file.name, "bits": DIFFERENCE_BITS} for name in sorted(coded)}
            parts = {f"{name}{end}" for name in coded for end in (CODES, SCALES)}
            full |= {name: {"file": file.name} for name in record.whole if name not in parts}
    differing = {DIFFERENCES: changed} if changed else {}
    return {"files": files, "modules": modules, "full": full, **differing}
