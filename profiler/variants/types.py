"""What is known of a variant: its `VariantSpec` for decisions, its `Manifest` for loading.

A manifest is complete: for every adapted module (`model.layers.3.self_attn.q_proj`) it has the tensors, the
places of their bytes, and every number needed to use them. For all kinds, `full` holds the tensors that
replace the base's tensors of the same name: norms, biases, embedding, head. `differences` holds embedding
and head if they are stored as differences from the base's.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from profiler.contents import SUFFIX
from profiler.types import TensorRef

SVD_GROUP = 128  # codes that share a scale and a zero


class VariantKind(StrEnum):
    LORA = "lora"
    BOFT = "boft"
    SPARSE_DELTA = "sparse_delta"
    SVD_DELTA = "svd_delta"


def launched_kinds(present: Collection[str]) -> tuple[VariantKind, ...]:
    """The kinds whose kernels an engine with captured graphs launches in every batch with variants: the kinds
    `present`, and always LoRA, so that adapters can be registered while the engine serves."""
    return tuple(kind for kind in VariantKind if kind is VariantKind.LORA or kind in present)


@dataclass(frozen=True)
class VariantLimits:
    """The limits of this installation's engines."""

    max_lora_rank: int


@dataclass(frozen=True)
class ModuleFacts:
    """One kind of module (`q_proj`, ...): the largest values found in any layer.

    `size_bytes` is what the module stores in one layer. A number without a meaning is zero: `rank` belongs to
    LoRA and SVD, `factors` (m) and `block_size` (b) to BOFT.
    """

    size_bytes: int
    rank: int = 0
    factors: int = 0
    block_size: int = 0


@dataclass(frozen=True)
class HeldBytes:
    """What an engine holds of a variant. Numbers in the engine's own type: `full_values` in whole tensors,
    and `layer_values` in hidden layers, whole on each TP rank. Bytes of parts of hidden layers with a type of
    their own: `layer_bytes`, of which each rank holds `whole_bytes` whole. `embedding_bytes` and `head_bytes`
    are for an embedding and a head that are stored as differences, else 0."""

    full_values: int
    layer_values: int
    layer_bytes: int
    embedding_bytes: int = 0
    head_bytes: int = 0
    whole_bytes: int = 0


@dataclass(frozen=True)
class VariantSpec:
    """A variant that was checked against its base; small enough for the state store.

    `weight_bytes` counts all its tensors as stored, `full_bytes` the part that replaces tensors of the base.
    `bits` are the widths of stored codes, widest first; empty if everything is floating point. `modules` has
    one entry per adapted kind of module, in the base's order. `held` is None in older records.
    """

    kind: VariantKind
    weight_bytes: int
    modules: dict[str, ModuleFacts]
    bits: tuple[int, ...] = ()
    full_bytes: int = 0
    replaces_embedding: bool = False
    replaces_head: bool = False
    held: HeldBytes | None = None

    @property
    def target_modules(self) -> tuple[str, ...]:
        return tuple(self.modules)

    @property
    def max_rank(self) -> int:
        return max((facts.rank for facts in self.modules.values()), default=0)


@dataclass(frozen=True)
class StoredFile:
    """A file on disk: its size and SHA-256 (hex)."""

    size_bytes: int
    sha256: str


@dataclass(frozen=True)
class FileRef:
    """A file with tensors. `sha256` (hex) is None for formats that carry no checksums (PEFT's).

    Size and checksum are of the contents. `compressed` is the size and checksum of the zstd file that holds
    them, or None if they are not compressed.
    """

    name: str
    size_bytes: int
    sha256: str | None = None
    compressed: StoredFile | None = None

    @property
    def stored_name(self) -> str:
        """The name of the file on disk."""
        return f"{self.name}{SUFFIX}" if self.compressed else self.name

    @property
    def stored(self) -> StoredFile:
        """The file on disk. Raises ValueError for a format without checksums."""
        if self.compressed:
            return self.compressed
        if self.sha256 is None:
            raise ValueError(f"{self.name} has no checksum")
        return StoredFile(self.size_bytes, self.sha256)


@dataclass(frozen=True)
class LoraModule:
    """y += scaling * (x A^T) B^T, with A [rank, in] and B [out, rank], floating point.

    `scaling` is alpha / rank, or alpha / sqrt(rank) for rsLoRA, by the patterns of the config.
    """

    a: TensorRef
    b: TensorRef
    rank: int
    scaling: float


@dataclass(frozen=True)
class BoftModule:
    """y = ((x Rot) W^T) * s + bias, Rot = B_{m-1} ... B_0; docs/formats.md has the formulas.

    `r` is [factors, in/block_size, block_size, block_size], not yet skew-symmetric; `s` is [out, 1].
    A trained bias is in the manifest's `full`.
    """

    r: TensorRef
    s: TensorRef
    factors: int
    block_size: int


@dataclass(frozen=True)
class SparseModule:
    """2:4 sparse delta; value = (code - 2^(bits-1)) * scale of its row and column group.

    `values` U8 [out, in/4] (4 bits) or [out, in/8] (2 bits), `indices` U8 [out, in/8], `scales` F16
    [out, in/group_size]; `group_size` is `in` when a row has one scale.
    """

    values: TensorRef
    indices: TensorRef
    scales: TensorRef
    bits: int
    group_size: int


@dataclass(frozen=True)
class SvdFactor:
    """Rows of V [rank, in] or of U^T [rank, out], w = (code - zero) * scale.

    `codes` U8 [rank, ceil(n/8) * bits], little-endian bit streams; `scales` F16 and `zeros` U8
    [rank, ceil(n/128)]. With 16 bits `codes` is F16 [rank, n] itself, and there are no scales and zeros.
    """

    codes: TensorRef
    scales: TensorRef | None
    zeros: TensorRef | None


@dataclass(frozen=True)
class SvdGroup:
    """`rank` successive singular ranks of one bit width; the singular values are folded into `u`."""

    bits: int
    rank: int
    v: SvdFactor
    u: SvdFactor


@dataclass(frozen=True)
class SvdModule:
    """delta [out, in] = sum over the groups of U V, most significant group first."""

    groups: tuple[SvdGroup, ...]

    @property
    def rank(self) -> int:
        return sum(group.rank for group in self.groups)


@dataclass(frozen=True)
class Difference:
    """The embedding or the head, as the base's tensor plus `scales[r] * codes[r]` in each row r.

    `codes` I8 [vocabulary, hidden], `scales` F32 [vocabulary].
    """

    codes: TensorRef
    scales: TensorRef

    @property
    def tensors(self) -> tuple[TensorRef, TensorRef]:
        return self.codes, self.scales


@dataclass(frozen=True)
class _Manifest:
    folder: Path
    spec: VariantSpec
    files: tuple[FileRef, ...]
    full: Mapping[str, TensorRef] = field(default_factory=dict, kw_only=True)
    differences: Mapping[str, Difference] = field(default_factory=dict, kw_only=True)


@dataclass(frozen=True)
class LoraManifest(_Manifest):
    modules: Mapping[str, LoraModule]


@dataclass(frozen=True)
class BoftManifest(_Manifest):
    modules: Mapping[str, BoftModule]


@dataclass(frozen=True)
class SparseManifest(_Manifest):
    modules: Mapping[str, SparseModule]


@dataclass(frozen=True)
class SvdManifest(_Manifest):
    modules: Mapping[str, SvdModule]


Manifest = LoraManifest | BoftManifest | SparseManifest | SvdManifest
