"""What a variant puts into one layer, before it is packed: the interface of a kind.

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
    """What operation `op` needs in `layer`: `parts` of memory, `fill` to write them, and `row`, the
    operation's table row once the parts' offsets in the arena are known. `fill` runs once `files` are
    read. They may still prove to be unsound, so it must neither write to them nor take from them where to
    write. Others run at the same time, also of the same files. Where there are `copies`, they write all
    parts and `fill` is not called.

    Those with the same `source` (not empty) share one memory: a tied head is the embedding. With `few_read` a
    step reads little of it, wherever it lies: the rows of an embedding that its tokens name.
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
        """What this variant puts into `layer`, cut for this rank. Raises ValueError if it does not fit."""
        ...
