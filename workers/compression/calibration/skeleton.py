"""A transformers model without weights, which runs one block at a time.

The model itself decides how to call a block (attention masks, windows, rotary angles, by the kind of layer).
So its forward pass runs each time, but every block except the requested one passes its input through. That
block gets the hidden states that we keep, and the pass ends after it.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from profiler.architectures.registry import describe
from profiler.errors import CheckpointError
from profiler.files import read_json
from profiler.odd_tensors import ROTARY
from workers.model_view import temporary_view
from workers.patches.torch import block_calls


class _Reached(Exception):
    """Ends a forward pass at the requested tensor."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


class Skeleton:
    """The model described by config.json in `folder`: parameters on the meta device, buffers (rotary
    frequencies) on `device`.

    Raises CheckpointError if transformers cannot build it.
    """

    def __init__(self, folder: Path, device: str, dtype: torch.dtype) -> None:
        where = folder / "config.json"
        self._description = describe(read_json(where), where)
        self._device, self._dtype = torch.device(device), dtype
        self._model = _empty_model(folder, dtype)
        _move_buffers(self._model, self._device)
        self._blocks: list[Any] = list(self._model.get_submodule(self.prefix.rstrip(".")))
        for number, block in enumerate(self._blocks):
            block_calls.intercept(block, functools.partial(self._call_block, number))
        self._wanted, self._hidden = 0, torch.empty(0)
        self._until_block = False

    @property
    def layers(self) -> int:
        return len(self._blocks)

    @property
    def prefix(self) -> str:
        """The prefix of a block's tensor names, before its number."""
        return self._description.layer_prefix

    @property
    def embedding(self) -> str:
        """The full name of the token embedding [vocabulary, hidden]."""
        return self._description.embedding

    def module(self, layer: int, name: str) -> nn.Module:
        """A module of a block. Raises CheckpointError if the block has no such module."""
        try:
            module: nn.Module = self._blocks[layer].get_submodule(name)
        except AttributeError as error:
            raise CheckpointError(f"{self.prefix}{layer} has no module {name}: {error}") from error
        return module

    def fill(self, layer: int, weights: Mapping[str, torch.Tensor]) -> None:
        """Give a block its weights. Raises CheckpointError if their names and shapes are not the block's."""
        block = self._blocks[layer]
        weights = {name: t for name, t in weights.items() if not name.endswith(ROTARY)}
        own = {name: t for name, t in block.state_dict().items() if t.is_floating_point()}
        wrong = sorted(own.keys() ^ weights.keys())
        if wrong:
            raise CheckpointError(
                f"expected the tensors that transformers' {type(block).__name__} has, got others: "
                f"{', '.join(wrong[:5])} on one side only; calibration cannot run this architecture"
            )
        for name, tensor in weights.items():
            _require_shape(f"{self.prefix}{layer}.{name}", tensor, own[name].shape)
        ready = {name: self._ready(t) for name, t in weights.items()}
        block.load_state_dict(ready, strict=False, assign=True)

    def replace(self, layer: int, module: str, weight: torch.Tensor) -> None:
        """Give one linear layer another weight [out, in]. Raises CheckpointError if the shape differs."""
        target: Any = self.module(layer, module)
        _require_shape(f"{self.prefix}{layer}.{module}", weight, target.weight.shape)
        target.load_state_dict({"weight": self._ready(weight)}, strict=False, assign=True)

    def drop(self, layer: int) -> None:
        """Release a block's weights."""
        block = self._blocks[layer]
        empty = {name: torch.empty_like(p, device="meta") for name, p in block.named_parameters()}
        block.load_state_dict(empty, strict=False, assign=True)

    @contextmanager
    def embedded(self, table: torch.Tensor) -> Iterator[None]:
        """Within the context, `embed` works: the table [vocabulary, hidden] is in memory. Raises
        CheckpointError.
        """
        module = self._model.get_input_embeddings()
        _require_shape(self.embedding, table, module.weight.shape)
        module.load_state_dict({"weight": self._ready(table)}, strict=False, assign=True)
        yield
        empty = {"weight": torch.empty_like(module.weight, device="meta")}
        module.load_state_dict(empty, strict=False, assign=True)

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """The input of block 0 [rows, tokens, hidden] for token ids [rows, tokens]."""
        self._wanted, self._until_block = 0, True
        return self._forward(input_ids=ids.to(self._device))

    def run(self, layer: int, hidden: torch.Tensor) -> torch.Tensor:
        """The block's output for its input; both are [rows, tokens, hidden]."""
        self._wanted, self._until_block, self._hidden = layer, False, hidden.to(self._device)
        return self._forward(inputs_embeds=self._hidden)

    def input_of(self, layer: int, module: str, hidden: torch.Tensor) -> torch.Tensor:
        """The input of the block's `module` [rows, tokens, in]; nothing behind it is computed."""

        def stop(_: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
            raise _Reached(inputs[0])

        with self.module(layer, module).register_forward_pre_hook(stop):
            return self.run(layer, hidden)

    @torch.no_grad()
    def _forward(self, **inputs: torch.Tensor) -> torch.Tensor:
        try:
            self._model.base_model(**inputs, use_cache=False)
        except _Reached as reached:
            return reached.tensor
        finally:
            self._hidden = torch.empty(0)
        raise CheckpointError(
            f"transformers' {type(self._model).__name__} did not run block {self._wanted} of {self.prefix}; "
            "calibration cannot run this architecture"
        )

    def _call_block(self, number: int, forward: Any, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if number < self._wanted:
            return hidden
        if self._until_block:
            raise _Reached(hidden)
        output = forward(self._hidden, *args, **kwargs)
        raise _Reached(output[0] if isinstance(output, tuple) else output)

    def _ready(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach().to(self._device, self._dtype)


def _empty_model(folder: Path, dtype: torch.dtype) -> Any:
    """Build the model. Parameters become empty when modules register them; buffers are computed, as no
    checkpoint stores them.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    def emptied(module: nn.Module, name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
        return None if parameter is None else nn.Parameter(parameter.to("meta"), requires_grad=False)

    try:
        with temporary_view(folder, weights=False) as view:
            config = AutoConfig.from_pretrained(view, local_files_only=True)
        hook: Any = emptied  # torch's annotation omits that hooks may return a parameter
        with register_module_parameter_registration_hook(hook):
            return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    except (ImportError, KeyError, OSError, ValueError) as error:
        raise CheckpointError(
            f"expected {folder / 'config.json'} to describe a model that transformers runs, got: {error}"
        ) from error


def _move_buffers(model: nn.Module, device: torch.device) -> None:
    for module in model.modules():
        for name, buffer in list(module.named_buffers(recurse=False)):
            setattr(module, name, buffer.to(device))


def _require_shape(name: str, tensor: torch.Tensor, shape: torch.Size) -> None:
    if tensor.shape != shape:
        raise CheckpointError(f"expected {name} to be {tuple(shape)}, got {tuple(tensor.shape)}")
