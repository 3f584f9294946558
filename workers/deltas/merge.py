"""Merges a base and a variant of any kind into one plain Hugging Face checkpoint.

It works file by file as the base is sharded, tensor by tensor within a file, in the base's types. Memory
holds one of the base's tensors and at most two of the variant's files.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from profiler.checkpoint import read_model
from profiler.files import DTYPE_BYTES, is_file, read_json
from profiler.types import ModelSpec, TensorRef
from profiler.variants.modules import EMBEDDING, HEAD, layer_of
from profiler.variants.reading import read_manifest
from profiler.variants.side_files import write_together
from profiler.variants.types import Manifest, VariantLimits
from profiler.weight_files import INDEX, locate
from workers.deltas import differences
from workers.deltas.added_rows import read_added_rows
from workers.deltas.folders import new_folder
from workers.deltas.merged import Module, merged_weight
from workers.deltas.tensors import DTYPES, read_bytes, read_tensor
from workers.deltas.variant_files import VariantFiles
from workers.deltas.writing import SafetensorsWriter

ANY_RANK = VariantLimits(max_lora_rank=2**31)
WEIGHTS = frozenset({".safetensors", ".bin", ".pt", ".pth", ".gguf", ".onnx", ".h5", ".msgpack"})
CONFIG = "config.json"

Progress = Callable[[float, str], None]
"""Told the share done (0..1) and what is next."""


def merge(base: Path, variant: Path, out: Path, progress: Progress | None = None) -> None:
    """Write the checkpoint in the folder `base` with the variant in `variant` merged to the new folder `out`.

    Config and tokenizer files are copied; the variant's own files take precedence. A variant with its own
    head unties it from the embedding, and one with added rows has a larger vocabulary. Raises CheckpointError
    if files cannot be read, are corrupt, or `out` exists or cannot be written, and AdapterError if the
    variant does not fit.
    """
    spec = read_model(base)
    manifest, added = read_manifest(variant, spec, ANY_RANK), read_added_rows(variant, spec)
    job = _Job(base, spec, manifest, added, progress or (lambda share, what: None))
    with new_folder(out) as folder:
        job.copy_side_files(folder)
        for file in sorted({place.file for place in job.places.values()}):
            job.write_file(folder, file)
    job.tell(1.0, "done")


def side_files(folder: Path) -> list[Path]:
    """A checkpoint's tokenizer, chat template, generation defaults and similar files: all but weights and
    config.
    """
    return [
        path
        for path in sorted(folder.iterdir())
        if is_file(path) and path.suffix not in WEIGHTS and path.name not in (CONFIG, INDEX)
    ]


class _Job:
    """One run of `merge`."""

    def __init__(
        self,
        base: Path,
        spec: ModelSpec,
        manifest: Manifest,
        added: Mapping[str, torch.Tensor],
        tell: Progress,
    ) -> None:
        self.base, self.tell = base, tell
        self.manifest, self.modules, self.added = manifest, _modules(manifest), added
        self.variant = VariantFiles(manifest)
        self.replaced = manifest.full.keys() | manifest.differences.keys()
        self.unties = spec.tied and (HEAD in self.replaced or _own_rows(added))
        self.places = locate(base)
        if spec.tied:
            self.places.pop(HEAD, None)  # a copy that engines ignore
        if self.unties:
            self.places[HEAD] = self.places[EMBEDDING]
        self.done = 0

    def copy_side_files(self, folder: Path) -> None:
        """Copy everything except weights: config, tokenizer, chat template, generation defaults."""
        for path in side_files(self.base):
            shutil.copyfile(path, folder / path.name)
        write_together(self.base, self.manifest.folder, folder)
        config = read_json(self.base / CONFIG)
        if HEAD in self.places:
            config["tie_word_embeddings"] = False
        if self.added:
            config["vocab_size"] = self._shape(EMBEDDING, self.places[EMBEDDING])[0]
        (folder / CONFIG).write_text(json.dumps(config, indent=2))
        if is_file(self.base / INDEX):
            total = sum(
                math.prod(self._shape(name, place)) * DTYPE_BYTES[place.dtype]
                for name, place in self.places.items()
            )
            weight_map = {name: place.file for name, place in sorted(self.places.items())}
            index = {"metadata": {"total_size": total}, "weight_map": weight_map}
            (folder / INDEX).write_text(json.dumps(index, indent=2))

    def write_file(self, folder: Path, file: str) -> None:
        """Write one shard, layer by layer, so that each file of the variant is read once."""
        held = {name: place for name, place in self.places.items() if place.file == file}
        names = sorted(held, key=lambda name: (-1 if (layer := layer_of(name)) is None else layer, name))
        entries = {name: (held[name].dtype, self._shape(name, held[name])) for name in names}
        with SafetensorsWriter(folder / file, entries) as writer:
            for name in writer.order:
                self.tell(self.done / len(self.places), name)
                self._write_tensor(writer, name, held[name])
                self.done += 1

    def _write_tensor(self, writer: SafetensorsWriter, name: str, place: TensorRef) -> None:
        module = self.modules.get(name.removesuffix(".weight"))
        if name in self.added:
            known = self._whole(name, place)
            writer.write(name, torch.cat((known, self.added[name].to(known.dtype))))
        elif name in self.replaced:
            writer.write(name, self._whole(name, place))
        elif module is not None and name.endswith(".weight"):
            weight = read_tensor(self.base, place)
            writer.write(name, merged_weight(weight, module, self.variant.read).to(weight.dtype))
        else:
            writer.write_bytes(name, read_bytes(self.base, place))

    def _whole(self, name: str, place: TensorRef) -> torch.Tensor:
        """A tensor that the variant may replace, in the base's type; a head without its own tensor is the
        embedding.
        """
        if name == HEAD and self.unties and HEAD not in self.replaced:
            name = EMBEDDING
        if name in self.manifest.full:
            return self.variant.read(self.manifest.full[name]).to(DTYPES[place.dtype])
        weight = read_tensor(self.base, place)
        if (difference := self.manifest.differences.get(name)) is None:
            return weight
        return differences.merged(weight, difference, self.variant.read)

    def _shape(self, name: str, place: TensorRef) -> tuple[int, ...]:
        if name not in self.added:
            return place.shape
        return (place.shape[0] + self.added[name].shape[0], *place.shape[1:])


def _own_rows(added: Mapping[str, torch.Tensor]) -> bool:
    """Whether the head's rows for added tokens differ from the embedding's."""
    return bool(added) and not torch.equal(added[HEAD].float(), added[EMBEDDING].float())


def _modules(manifest: Manifest) -> Mapping[str, Module]:
    return manifest.modules
