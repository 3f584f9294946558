"""A variant's weights for one layer, before they are packed: the interface of a kind.

Everything else (slots, memory, loading, launching) is the same for all kinds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from workers.kernels.types import Part, total_bytes
from workers.variants.copies import MatrixCopy
from workers.variants.shapes import LayerShape
from workers.variants.tensors import Holding

Fill = Callable[[Mapping[str, torch.Tensor]], None]
Row = Callable[[Mapping[str, int]], tuple[int, ...]]


@dataclass(frozen=True)
class LayerWeights:
    """The weights that operation `op` needs in `layer`.

    `parts` describes their memory, `fill` writes them, and `row` gives the operation's table row for the
    parts' offsets in the arena. `fill` runs once `files` are read. The files may still be invalid, so `fill`
    must not write to them, nor take write positions from them. Other fills run at the same time, also from
    the same files. If there are `copies`, they write all parts and `fill` is not called.

    Weights with the same `source` (not empty) share one memory: a tied head is the embedding. `few_read`: a
    step reads only a few rows, wherever they lie: the rows of an embedding for its tokens.
    """

    layer: str
    op: str
    parts: tuple[Part, ...]
    fill: Fill
    row: Row
    source: str = ""
    files: tuple[Holding, ...] = ()
    copies: tuple[MatrixCopy, ...] = ()
    few_read: bool = False

    @property
    def size_bytes(self) -> int:
        return total_bytes(self.parts)


class Contents(Protocol):
    """One variant's opened files."""

    def layer_weights(self, layer: LayerShape, dtype: torch.dtype) -> Sequence[LayerWeights]:
        """This variant's weights for `layer`, cut for this rank. Raises ValueError if they do not fit."""
        ...
