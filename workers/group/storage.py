"""The memory of tensors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch


def storage_bytes(nested: Any) -> int:
    """The bytes of all tensors in nested lists; layers may be views of one storage."""
    storages = (tensor.untyped_storage() for tensor in _tensors(nested))
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def _tensors(nested: Any) -> Iterator[torch.Tensor]:
    if isinstance(nested, torch.Tensor):
        yield nested
        return
    for part in nested or ():
        yield from _tensors(part)
