"""This rank's block of each weight matrix: all that a kind needs to cut its tensors."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class Slice:
    """One of the matrices fused into a linear layer: rows [start, start + size) of `full` are on this rank.

    `name` is the module's name in the checkpoint, e.g. model.layers.0.self_attn.q_proj.
    """

    name: str
    start: int
    size: int
    full: int

    @property
    def rows(self) -> slice:
        return slice(self.start, self.start + self.size)


@dataclass(frozen=True)
class LinearShape:
    """A linear layer on this rank: its slices, and columns [in_start, in_start + in_size) of `in_full`."""

    name: str
    slices: tuple[Slice, ...]
    in_start: int
    in_size: int
    in_full: int

    @property
    def columns(self) -> slice:
        return slice(self.in_start, self.in_start + self.in_size)

    @cached_property  # read at every product
    def widths(self) -> tuple[int, ...]:
        return tuple(part.size for part in self.slices)

    @cached_property
    def out_size(self) -> int:
        return sum(self.widths)

    @property
    def splits_input(self) -> bool:
        """True for row parallelism: this rank sees a part of the input, and its output is a summand."""
        return self.in_size != self.in_full


@dataclass(frozen=True)
class VocabularyShape:
    """An embedding or a head: tokens [start, start + size) of the vocabulary are on this rank.

    `tied`: the base's head is its embedding.
    """

    name: str
    start: int
    size: int
    full: int
    width: int
    is_head: bool
    tied: bool

    @property
    def rows(self) -> slice:
        return slice(self.start, self.start + self.size)


@dataclass(frozen=True)
class NormShape:
    """A normalisation of `width` values; every rank has all of it.

    `zero_centred`: the weights are added to one before they multiply (Gemma).
    """

    name: str
    width: int
    zero_centred: bool = False


LayerShape = LinearShape | VocabularyShape | NormShape
