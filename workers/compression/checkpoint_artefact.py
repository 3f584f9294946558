"""A plain checkpoint with compressed weights in place of the fine-tune's: for evaluating a method, not for
size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from profiler.checkpoint import read_model
from profiler.files import read_json
from profiler.weight_files import INDEX, locate_in
from workers.compression.artefacts import Stored, same
from workers.compression.durable import Entry, held, write_bytes, write_json
from workers.compression.records import PartRecord
from workers.compression.sources import Source
from workers.compression.types import Compressed, Problem
from workers.deltas.merge import CONFIG, side_files
from workers.deltas.tensors import read_tensor


class CheckpointArtefact:
    """Stores every tensor of the fine-tune; compressed tensors in decoded form, in the checkpoint's type."""

    def __init__(self, tuned: Source) -> None:
        self._tuned, self._spec = tuned, tuned.spec

    def file_name(self, part: int) -> str:
        return f"model-{part + 1:05d}-of-{self._spec.num_layers + 1:05d}.safetensors"

    def store(self, problem: Problem, compressed: Compressed, dtype: torch.dtype) -> Stored:
        rounded = compressed.weight.to(dtype)
        return Stored({f"{problem.name}.weight": rounded}, {}, rounded.float())

    def restore(self, problem: Problem, facts: Mapping[str, Any], file: Path) -> torch.Tensor:
        place = locate_in(file.parent, file.name)[f"{problem.name}.weight"]
        return read_tensor(file.parent, place).float().to(problem.base.device)

    def unchanged(self, name: str, weight: torch.Tensor) -> Mapping[str, torch.Tensor]:
        return {name: weight}

    def whole(self, name: str) -> Mapping[str, Entry]:
        return {name: held(self._tuned.tensor(name))}

    def rest(self) -> Mapping[str, Entry]:
        names = list(self._spec.other_shapes)
        if self._unties:
            names.append(self._spec.head)
        found = {}
        for name in names:
            tensor = self._tuned.tensor(name)
            found[name] = Entry(tensor.dtype, tuple(tensor.shape), partial(self._tuned.tensor, name))
        return found

    def finish(self, folder: Path, records: Sequence[PartRecord], notes: Mapping[str, Any]) -> int:
        for path in side_files(self._tuned.folder):
            write_bytes(folder / path.name, path.read_bytes())
        config = read_json(self._tuned.folder / CONFIG)
        if self._unties or not self._spec.tied:
            config["tie_word_embeddings"] = False
        write_json(folder / CONFIG, config, indent=2)
        files = [record.file.name for record in records if record.file is not None]
        places = {name: file for file in files for name in locate_in(folder, file)}
        sizes = (ref.size_bytes for file in files for ref in locate_in(folder, file).values())
        write_json(folder / INDEX, {"metadata": {"total_size": sum(sizes)}, "weight_map": places}, indent=2)
        write_json(folder / "compression.json", notes, indent=1)
        read_model(folder)
        return 0

    def spec(self, folder: Path) -> None:
        return None

    @property
    def _unties(self) -> bool:
        """Whether an adapter gives a tied base its own head."""
        spec = self._spec
        return spec.tied and not same(self._tuned.tensor(spec.embedding), self._tuned.tensor(spec.head))
