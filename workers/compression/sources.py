"""The model to compress: a checkpoint, or a base with an adapter of any kind merged in. Reads one tensor at a
time.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import torch

from profiler.checkpoint import read_model
from profiler.files import is_file
from profiler.model_files import CONFIG as MODEL_CONFIG
from profiler.model_purpose import check_purpose
from profiler.types import ModelSpec
from profiler.variants.delta import DELTA
from profiler.variants.odd_names import CONFIG
from profiler.variants.reading import is_variant, read_manifest
from profiler.variants.types import VariantLimits
from profiler.weight_files import INDEX, SINGLE, locate
from workers.deltas import differences
from workers.deltas.merged import Module, merged_weight
from workers.deltas.tensors import read_tensor
from workers.deltas.variant_files import VariantFiles

ANY_RANK = VariantLimits(max_lora_rank=2**31)


class Source(Protocol):
    """A model's tensors by their full names, read on demand.

    `origin` is the given folder, for an adapter its own; `folder` has config and tokenizer. `identity`
    distinguishes sources, 64 hexadecimal digits. `tensor` returns memory that the caller owns; the head of a
    tied model is its embedding. It raises CheckpointError if files changed or are corrupt.
    """

    @property
    def origin(self) -> Path: ...
    @property
    def folder(self) -> Path: ...
    @property
    def spec(self) -> ModelSpec: ...
    @property
    def identity(self) -> str: ...
    def tensor(self, name: str) -> torch.Tensor: ...


def open_source(folder: Path, base: Source | None = None) -> Source:
    """The checkpoint in `folder`, or the adapter there on `base`.

    Raises CheckpointError if files are missing or cannot be used, AdapterError if an adapter does not fit the
    base. Reads headers, and an adapter's data.
    """
    if base is not None and is_variant(folder):
        if is_file(folder / MODEL_CONFIG) and any(is_file(folder / name) for name in (INDEX, SINGLE)):
            check_purpose(folder, {})
        return Adapted(base, folder)
    return Checkpoint(folder)


class Checkpoint:
    """A plain Hugging Face folder."""

    def __init__(self, folder: Path) -> None:
        self.origin = self.folder = folder
        self.spec = read_model(folder)
        self._places = locate(folder)

    @property
    def identity(self) -> str:
        return self.spec.fingerprint

    def tensor(self, name: str) -> torch.Tensor:
        stored = self.spec.embedding if self.spec.tied and name == self.spec.head else name
        return read_tensor(self.folder, self._places[stored])


class Adapted:
    """A base with a variant (LoRA, BOFT, a delta) merged in; changed linear layers are float32.

    Memory holds one tensor of the base and at most two of the variant's files.
    """

    def __init__(self, base: Source, variant: Path) -> None:
        self._base, self.spec, self.folder, self.origin = base, base.spec, base.folder, variant
        self._manifest = read_manifest(variant, base.spec, ANY_RANK)
        self._files = VariantFiles(self._manifest)
        self._modules: Mapping[str, Module] = self._manifest.modules
        self.identity = _identity(
            base.identity, variant, tuple(file.stored_name for file in self._manifest.files)
        )

    def tensor(self, name: str) -> torch.Tensor:
        stored = self._stored(name)
        if stored in self._manifest.full:
            return self._files.read(self._manifest.full[stored]).clone()
        weight = self._base.tensor(name)
        if (difference := self._manifest.differences.get(stored)) is not None:
            return differences.merged(weight, difference, self._files.read)
        module = self._modules.get(name.removesuffix(".weight")) if name.endswith(".weight") else None
        return weight if module is None else merged_weight(weight, module, self._files.read).float()

    def _stored(self, name: str) -> str:
        """The tensor's stored name: a tied head without its own tensor is the embedding."""
        own = name in self._manifest.full or name in self._manifest.differences
        return self.spec.embedding if self.spec.tied and name == self.spec.head and not own else name


def _identity(base: str, variant: Path, files: tuple[str, ...]) -> str:
    """The identity of a variant on a base, from its whole files: they are small and may have no checksums."""
    digest = hashlib.sha256(base.encode())
    for name in (CONFIG, DELTA, *files):
        if is_file(variant / name):
            with (variant / name).open("rb") as file:
                digest.update(f"{name}:{hashlib.file_digest(file, 'sha256').hexdigest()}".encode())
    return digest.hexdigest()
