"""Hooks in vLLM's modules: they add a variant's part around the base's own computation.

No module is replaced. A linear layer, the embedding and the head get a `quant_method` around their own, which
vLLM itself uses to change the arithmetic. A norm gets a subclass of its class. Inside torch.compile the hooks
are opaque operators. A tensor of the layer, its tag, identifies the layer to them. A name would be a constant
of the graph. Then each layer's graph would be compiled instead of one (44 s instead of 7 for 32 layers on an
H200's host).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from vllm.forward_context import get_forward_context

from workers.variants import merged_product, operators
from workers.variants.layer_context import LayerContext
from workers.variants.shapes import LinearShape, NormShape, VocabularyShape

TAG = "variant_tag"  # the buffer of a hooked module that its operators receive


class VariantLinear:
    """A linear layer's arithmetic: the base's product on (rotated) inputs, plus what variants add."""

    def __init__(self, inner: Any, layer: torch.nn.Module, shape: LinearShape, context: LayerContext) -> None:
        self._inner = inner
        self._layer = layer
        self._shape = shape
        self._context = context
        self._weight = merged_product.PlainWeight(layer, shape)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def apply(
        self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        out: torch.Tensor = torch.ops.ostinato.linear(x, bias, layer.variant_tag, self._shape.out_size)
        return out

    def run(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """x [..., in] -> [..., out], on this rank."""
        if not self._context.batch.operations:
            return self._base(x, bias)
        rows = x.reshape(-1, x.shape[-1])
        cut = merged_product.tiles(self._context, self._shape, rows)
        merging = self._weight.of(rows.dtype) if cut is not None else None
        if cut is None or merging is None:
            out = self._rotated(rows, bias) if self._context.has("boft") else self._base(rows, bias)
        else:
            out = merged_product.product(rows, merging, bias, cut, self._context, self._shape)
        for op in operators.ADDITIONS:
            if self._context.has(op):
                operators.add(op, rows, out, self._context, self._shape.widths, merging is not None)
        if self._context.has("bias"):
            operators.replace_bias(out, bias, self._context)
        return out.view(*x.shape[:-1], out.shape[-1])

    def _base(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return cast(torch.Tensor, self._inner.apply(self._layer, x, bias))

    def _rotated(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """The base's product, with rotated inputs and rescaled outputs on the rows of some variants."""
        rotated = operators.rotate(self._whole_input(x), self._context, self._shape)  # [slices, rows, in]
        out = self._product_of_slices(rotated, bias)
        operators.rescale(out, bias, self._context, self._shape.widths)
        return out

    def _product_of_slices(self, rotated: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Multiply each slice of the weight by its own input."""
        if len(rotated) == 1:
            return self._base(rotated[0], bias)
        weight = self._weight.of(rotated.dtype)
        if weight is not None and rotated.device.type == "cuda":
            return self._by_slices(rotated, weight, bias)
        # A packed or quantised weight cannot be cut, so each slice's input needs the whole product.
        products = [self._base(part, bias) for part in rotated]
        return torch.cat([p[:, cut] for p, cut in zip(products, self._cuts(), strict=True)], dim=1)

    def _by_slices(
        self, rotated: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        out = rotated.new_empty(rotated.shape[1], self._shape.out_size)
        for part, cut in zip(rotated, self._cuts(), strict=True):
            torch.mm(part, weight[cut].t(), out=out[:, cut])
        return out if bias is None else out.add_(bias)

    def _cuts(self) -> Sequence[slice]:
        ends = [sum(self._shape.widths[: i + 1]) for i in range(len(self._shape.widths))]
        return [slice(end - width, end) for end, width in zip(ends, self._shape.widths, strict=True)]

    def _whole_input(self, x: torch.Tensor) -> torch.Tensor:
        """The input of all ranks, since a rotation mixes columns of all ranks."""
        if not self._shape.splits_input:
            return x
        from vllm.distributed import tensor_model_parallel_all_gather

        return cast(torch.Tensor, tensor_model_parallel_all_gather(x))


class VariantEmbedding:
    """The embedding's arithmetic: rows of variants with their own table are looked up there."""

    def __init__(
        self, inner: Any, layer: torch.nn.Module, shape: VocabularyShape, context: LayerContext
    ) -> None:
        self._inner = inner
        self._layer = layer
        self._context = context
        self._width = shape.width

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def embedding(self, layer: torch.nn.Module, ids: torch.Tensor) -> torch.Tensor:
        tag, dtype = layer.variant_tag, layer.weight.dtype
        out: torch.Tensor = torch.ops.ostinato.embedding(ids, tag, self._width, dtype)
        return out

    def run(self, ids: torch.Tensor) -> torch.Tensor:
        """ids [...] of this rank's vocabulary -> [..., width]."""
        out: torch.Tensor = self._inner.embedding(self._layer, ids)
        if self._context.has("embedding"):
            operators.embed(ids.reshape(-1), out.view(-1, out.shape[-1]), self._context)
        return out


class VariantHead:
    """The head's arithmetic.

    It runs outside torch.compile and CUDA graphs, on the sampled rows, or on the rows of prompts that are
    scored (`workers.patches.vllm.prompt_scoring`).
    """

    def __init__(self, inner: Any, context: LayerContext) -> None:
        self._inner = inner
        self._context = context

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def apply(
        self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        logits: torch.Tensor = self._inner.apply(layer, x, bias=bias)
        if self._context.has("head"):
            operators.head(x, logits, self._context, self._context.batch.head_rows)
        return logits


def norm_class(base: type[torch.nn.Module]) -> type[torch.nn.Module]:
    """A subclass of a norm that applies the variants' own weights to their rows."""

    class VariantNorm(base):  # type: ignore[valid-type, misc]
        def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
            if residual is None:
                out = super().forward(x)
                torch.ops.ostinato.norm(out, x, self.variant_tag)
                return out
            out, total = super().forward(x, residual)
            torch.ops.ostinato.norm(out, total, self.variant_tag)
            return out, total

    return VariantNorm


class NormHook:
    def __init__(self, shape: NormShape, epsilon: float, context: LayerContext) -> None:
        self._shape = shape
        self._epsilon = epsilon
        self._context = context

    def run(self, out: torch.Tensor, source: torch.Tensor) -> None:
        """Apply the variants' weights. `source` is the input that was normalised into `out`: [tokens, width],
        or [tokens, heads, width].
        """
        if not self._context.has("norm"):
            return
        pairs = [(out, source)] if out.ndim == 2 else zip(out.unbind(1), source.unbind(1), strict=True)
        for normed, before in pairs:
            operators.norm(normed, before, self._epsilon, self._context, self._shape)


# --- the operators that torch.compile sees -----------------------------------------------------


def tagged(module: torch.nn.Module, device: torch.device) -> str:
    """Give a module its tag; returns the key of its hook in the forward context."""
    made = torch.empty(1, dtype=torch.uint8, device=device)
    module.register_buffer(TAG, made, persistent=False)
    return _key(made)


def _key(tag: torch.Tensor) -> str:
    return f"ostinato-{tag.data_ptr()}"


def _hook(tag: torch.Tensor) -> Any:
    return get_forward_context().no_compile_layers[_key(tag)]


def _linear(x: torch.Tensor, bias: torch.Tensor | None, tag: torch.Tensor, out_size: int) -> torch.Tensor:
    return cast(torch.Tensor, _hook(tag).run(x, bias))


def _linear_shape(
    x: torch.Tensor, bias: torch.Tensor | None, tag: torch.Tensor, out_size: int
) -> torch.Tensor:
    return x.new_empty(*x.shape[:-1], out_size)


def _embedding(ids: torch.Tensor, tag: torch.Tensor, width: int, dtype: torch.dtype) -> torch.Tensor:
    return cast(torch.Tensor, _hook(tag).run(ids))


def _embedding_shape(ids: torch.Tensor, tag: torch.Tensor, width: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(*ids.shape, width, dtype=dtype, device=ids.device)


def _norm(out: torch.Tensor, source: torch.Tensor, tag: torch.Tensor) -> None:
    _hook(tag).run(out, source)


def _norm_shape(out: torch.Tensor, source: torch.Tensor, tag: torch.Tensor) -> None:
    return None


_LIBRARY = torch.library.Library("ostinato", "FRAGMENT")
_SCHEMAS = (
    ("linear(Tensor x, Tensor? bias, Tensor tag, int out_size) -> Tensor", _linear, _linear_shape),
    (
        "embedding(Tensor ids, Tensor tag, int width, ScalarType dtype) -> Tensor",
        _embedding,
        _embedding_shape,
    ),
    ("norm(Tensor(a!) out, Tensor source, Tensor tag) -> ()", _norm, _norm_shape),
)
_IMPLEMENTED: set[tuple[str, str]] = set()  # operators of this process, by name and kind of device


def define_operators(device_type: str) -> None:
    """Make torch.ops.ostinato.* for a device type; once per process."""
    for schema, run, shape in _SCHEMAS:
        name = schema.split("(", 1)[0]
        if not hasattr(torch.ops.ostinato, name):
            _LIBRARY.define(schema)
            torch.library.register_fake(f"ostinato::{name}", shape, lib=_LIBRARY)
        key = "CUDA" if device_type == "cuda" else "CPU"
        if (name, key) not in _IMPLEMENTED:
            _LIBRARY.impl(name, run, key)
            _IMPLEMENTED.add((name, key))
