"""Finds the layers of a vLLM model that variants may change, describes this rank's block of each, and hooks
them.

No other module knows vLLM's layer classes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from vllm.model_executor.layers.layernorm import GemmaRMSNorm, RMSNorm
from vllm.model_executor.layers.linear import (
    LinearBase,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
)
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

from workers.patches.vllm import layer_methods
from workers.variants.layer_context import LayerContext
from workers.variants.layers import NormHook, VariantEmbedding, VariantHead, VariantLinear, norm_class
from workers.variants.shapes import LayerShape, LinearShape, NormShape, Slice, VocabularyShape

ADAPTED = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
HEAD_MODULE = "lm_head"

Found = tuple[torch.nn.Module, LayerShape]


def find_layers(model: Any) -> list[Found]:
    """Every module of this rank that variants may change, in the model's order.

    An embedding that is also the head (as for tied Qwen2 and Qwen3 in vLLM 0.26) comes once more, as a head.
    """
    packed = getattr(model, "packed_modules_mapping", {})
    tied = bool(getattr(model.config, "tie_word_embeddings", False))
    found = [
        (module, shape)
        for name, module in model.named_modules()
        for shape in _shape(name, module, packed, tied)
    ]
    head = getattr(model, HEAD_MODULE, None)
    if isinstance(head, VocabParallelEmbedding) and not isinstance(head, ParallelLMHead):
        found.append((head, _vocabulary(HEAD_MODULE, head, tied, is_head=True)))
    return found


def _shape(
    name: str, module: torch.nn.Module, packed: Mapping[str, list[str]], tied: bool
) -> Iterator[LayerShape]:
    """The module's shape, if variants may change it."""
    if isinstance(module, VocabParallelEmbedding):  # a head is one, too
        yield _vocabulary(name, module, tied, isinstance(module, ParallelLMHead))
    elif isinstance(module, LinearBase):
        parent, _, last = name.rpartition(".")
        parts = packed.get(last, [last])
        if all(part in ADAPTED for part in parts):
            yield _linear(name, [f"{parent}.{part}" for part in parts], module)
    elif isinstance(module, GemmaRMSNorm):
        yield NormShape(name, module.weight.shape[0], zero_centred=True)
    elif isinstance(module, RMSNorm) and getattr(module, "has_weight", True):
        yield NormShape(name, module.weight.shape[0])


def _linear(name: str, parts: list[str], module: Any) -> LinearShape:
    if isinstance(module, RowParallelLinear):
        size, full = module.input_size_per_partition, module.input_size
        whole = Slice(parts[0], 0, module.output_size, module.output_size)
        return LinearShape(name, (whole,), module.tp_rank * size, size, full)
    return LinearShape(name, tuple(_slices(parts, module)), 0, module.input_size, module.input_size)


def _slices(parts: list[str], module: Any) -> Iterator[Slice]:
    if isinstance(module, QKVParallelLinear):
        yield from _qkv_slices(parts, module)
        return
    sizes = module.output_sizes if isinstance(module, MergedColumnParallelLinear) else [module.output_size]
    ranks = getattr(module, "tp_size", 1)
    for part, full in zip(parts, sizes, strict=True):
        yield Slice(part, module.tp_rank * (full // ranks), full // ranks, full)


def _qkv_slices(parts: list[str], module: Any) -> Iterator[Slice]:
    """Split query heads over the ranks; key and value heads, too, unless several ranks share one."""
    head, rank = module.head_size, module.tp_rank
    shared_by = module.num_kv_head_replicas
    counts = (
        (module.num_heads, module.total_num_heads, rank),
        (module.num_kv_heads, module.total_num_kv_heads, rank // shared_by),
        (module.num_kv_heads, module.total_num_kv_heads, rank // shared_by),
    )
    for part, (here, total, index) in zip(parts, counts, strict=True):
        yield Slice(part, index * here * head, here * head, total * head)


def _vocabulary(name: str, module: Any, tied: bool, is_head: bool) -> VocabularyShape:
    shard = module.shard_indices
    start, end = shard.org_vocab_start_index, shard.org_vocab_end_index
    return VocabularyShape(
        name, start, end - start, module.org_vocab_size, module.embedding_dim, is_head, tied
    )


def hook(module: Any, shape: LayerShape, context: LayerContext, register: Callable[[Any, Any], None]) -> None:
    """Install the hook. `register(module, hook)` makes it accessible inside torch.compile."""
    match shape:
        case LinearShape():
            layer_methods.put_linear(module, VariantLinear(module.quant_method, module, shape, context))
            register(module, module.quant_method)
        case VocabularyShape(is_head=True):
            layer_methods.put_head(module, VariantHead(module.quant_method, context))
        case VocabularyShape():
            made = VariantEmbedding(module.quant_method, module, shape, context)
            layer_methods.put_embedding(module, made)
            register(module, made)
        case NormShape():
            layer_methods.put_norm(module, norm_class(type(module)))
            register(module, NormHook(shape, module.variance_epsilon, context))
