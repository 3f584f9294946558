"""Runs the tuned model over the calibration texts, block by block, with one block's weights in memory at a
time.

DeltaZip, section 4.2, and DeltaMix, section 3: a layer is compressed for the inputs that the compressed
layers before it give. So the layers of a block that share inputs are compressed together, in the order in
which they run. Each group follows the replacement of the layers before it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

import torch

from profiler.errors import CheckpointError
from workers.compression.calibration.batches import Batch, add_gram, batches_of
from workers.compression.calibration.skeleton import Skeleton
from workers.compression.calibration.texts import Texts
from workers.compression.types import Inputs

GROUPS = (
    ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    ("self_attn.o_proj",),
    ("mlp.gate_proj", "mlp.up_proj"),
    ("mlp.down_proj",),
)
"""The adaptable modules of a block by what they are given, in the order in which they run."""


class Tuned(Protocol):
    """A checkpoint to compress: its folder holds config.json, and `tensor` reads one tensor by its full
    name.
    """

    @property
    def folder(self) -> Path: ...

    def tensor(self, name: str) -> torch.Tensor: ...


class CalibratedBlocks:
    """The hidden states before one block after another.

    For each block, from 0 on, call `enter` with the tuned weights; for each of `groups`, `inputs`, then
    `replace` of its modules; then `leave`.

    A block that is already compressed (a resumed job) takes only `enter`, `replace` and `leave`. Calls out of
    this order raise ValueError.
    """

    groups: tuple[tuple[str, ...], ...] = GROUPS

    def __init__(self, skeleton: Skeleton, batches: Sequence[Batch], device: str) -> None:
        self._skeleton, self._batches, self._device = skeleton, batches, device
        self._tokens = sum(batch.tokens for batch in batches)
        self._next = 0
        self._entered = False

    @property
    def tokens(self) -> int:
        """Real tokens of the calibration texts."""
        return self._tokens

    def enter(self, layer: int, weights: Mapping[str, torch.Tensor]) -> None:
        """Load block `layer`: all its tensors, uncompressed, by their names below the block, as in the
        checkpoint.

        Raises CheckpointError if they are not the tensors of the model's blocks.
        """
        if self._entered or layer != self._next or layer >= self._skeleton.layers:
            state = "left" if self._entered else "entered"
            raise ValueError(f"expected block {self._next} to be {state} next, got enter({layer})")
        self._skeleton.fill(layer, weights)
        self._entered = True

    def inputs(self, modules: Sequence[str]) -> Inputs:
        """The inputs of `modules`, which share them, with the block's current weights.

        The Gram matrix is float32 [in, in] on the compute device. Raises CheckpointError if the inputs are
        not finite.
        """
        self._require_entered("inputs")
        if len(modules) != 1 and not any(set(modules) <= set(group) for group in self.groups):
            raise ValueError(f"expected modules of one of {self.groups}, got {tuple(modules)}")
        gram: torch.Tensor | None = None
        for batch in self._batches:
            found = batch.real(self._skeleton.input_of(self._next, modules[0], batch.hidden))
            if gram is None:
                gram = torch.zeros(found.shape[1], found.shape[1], device=self._device)
            add_gram(gram, found, self._tokens)
        assert gram is not None  # there are texts
        if not bool(torch.isfinite(gram).all()):
            raise CheckpointError(
                f"the inputs of {self._skeleton.prefix}{self._next}.{modules[0]} are not finite over the "
                "calibration texts; compute in bfloat16 or float32, and check the checkpoint for NaN"
            )
        return Inputs(gram, self._tokens)

    def replace(self, module: str, weight: torch.Tensor) -> None:
        """Replace the weight of `module` by the compressed weight [out, in]. Raises CheckpointError on
        another shape.
        """
        self._require_entered("replace")
        self._skeleton.replace(self._next, module, weight)

    def leave(self) -> None:
        """Run the block as it is: its outputs are the next block's inputs. Its weights are released."""
        self._require_entered("leave")
        if self._next + 1 < self._skeleton.layers:
            for batch in self._batches:
                batch.hidden = self._skeleton.run(self._next, batch.hidden).to(batch.hidden.device)
        self._skeleton.drop(self._next)
        self._next, self._entered = self._next + 1, False

    def _require_entered(self, call: str) -> None:
        if not self._entered:
            raise ValueError(f"expected enter({self._next}, weights) before {call}")


def open_blocks(tuned: Tuned, texts: Texts, device: str, dtype: torch.dtype) -> CalibratedBlocks:
    """Open the blocks, ready to enter block 0. Memory holds the texts' hidden states: tokens x hidden size,
    in `dtype`.

    `device` and `dtype` are those of the computation: bfloat16 on GPUs, float32 on CPUs. Raises
    CheckpointError if transformers cannot run the model, or a token is beyond its vocabulary.
    """
    skeleton = Skeleton(tuned.folder, device, dtype)
    batches = batches_of(texts.rows, device)
    table = tuned.tensor(skeleton.embedding)
    _check_ids(texts, table.shape[0])
    store = _store(device, texts.tokens * table.shape[1] * dtype.itemsize)
    with skeleton.embedded(table):
        del table
        for batch in batches:
            batch.hidden = skeleton.embed(batch.ids).to(store)
    return CalibratedBlocks(skeleton, batches, device)


def _check_ids(texts: Texts, vocabulary: int) -> None:
    largest = max(int(row.max()) for row in texts.rows)
    if largest >= vocabulary:
        raise CheckpointError(
            f"the tokenizer turns {texts.source} into token {largest}, but the model's embedding has only "
            f"{vocabulary} rows; copy the tokenizer that the model was trained with into its folder"
        )


def _store(device: str, size_bytes: int) -> str:
    """The device for the hidden states: the GPU if they take at most a third of its free memory."""
    if torch.device(device).type != "cuda":
        return "cpu"
    free_bytes, _ = torch.cuda.mem_get_info(torch.device(device))
    return device if size_bytes <= free_bytes // 3 else "cpu"
