"""The parts of a base that a variant may change: the adaptable modules, and the replaceable tensors."""

from __future__ import annotations

import re
from collections.abc import Iterable

from profiler.checkpoint import block_of
from profiler.errors import AdapterError
from profiler.files import FLOAT_DTYPES
from profiler.types import ModelSpec, TensorRef
from profiler.variants.odd_names import TRAINED_ON
from profiler.variants.types import ModuleFacts

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
MODULE_NAME = re.compile(r"model\.layers\.(0|[1-9][0-9]{0,3})\.(self_attn|mlp)\.(\w+)", re.ASCII)
NEWLY_ADAPTABLE = ("Gemma3ForCausalLM",)  # older records of such bases name no modules
LAYER_TENSOR = re.compile(r"model\.layers\.(0|[1-9][0-9]{0,3})\.([\w.]+)", re.ASCII)


def require_adaptable(base: ModelSpec) -> None:
    """Raise AdapterError if no variant of this base can be served."""
    if base.adaptable:
        return
    if base.architecture in NEWLY_ADAPTABLE:
        raise AdapterError(
            f"an older version, which served no variants of {base.architecture}, registered the base; "
            "delete the base and register it again"
        )
    raise AdapterError(
        f"adapters and deltas on {base.architecture} are not supported yet; supported bases are Llama, "
        "Mistral, Qwen2, Qwen3 and Gemma 3"
    )


def short_name(module_name: str) -> str:
    """The last part of the name: q_proj for model.layers.3.self_attn.q_proj."""
    return module_name.rpartition(".")[2]


def layer_of(name: str) -> int | None:
    """The hidden layer of a module or tensor; None for the embedding, the last norm and the head."""
    match = LAYER_TENSOR.fullmatch(name)
    return int(match[1]) if match else None


def require_module(name: str, base: ModelSpec, where: str) -> tuple[int, int]:
    """(out, in) features of the module with this full name. Raises AdapterError if the base lacks it."""
    match = MODULE_NAME.fullmatch(name)
    if not match:
        raise AdapterError(
            f"{where}: expected modules of hidden layers that variants can adapt, got {name[:200]!r}; "
            "expected names like model.layers.0.self_attn.q_proj"
        )
    layer, block, module = int(match[1]), match[2], match[3]
    if module not in base.linear_shapes or block != block_of(module):
        raise AdapterError(
            f"{where}: the base ({base.architecture}) has no module {block}.{module[:80]}; it has "
            f"{', '.join(base.linear_shapes)}: register the adapter with {TRAINED_ON}"
        )
    if layer >= base.num_layers:
        raise AdapterError(
            f"{where}: {name[:200]} belongs to layer {layer}, but the base has {base.num_layers} layers; "
            f"register the adapter with {TRAINED_ON}"
        )
    return base.linear_shapes[module]


def full_shape(name: str, base: ModelSpec) -> tuple[int, ...] | None:
    """The shape of a tensor that a variant may replace as a whole; None if it may not.

    These are norms, biases, the embedding and the head; a variant of a tied base may have its own head.
    """
    if name == HEAD:
        return base.other_shapes.get(HEAD) or base.other_shapes.get(EMBEDDING)
    if name in base.other_shapes:
        return base.other_shapes[name]
    match = LAYER_TENSOR.fullmatch(name)
    if not match or int(match[1]) >= base.num_layers:
        return None
    linear = {f"{block_of(module)}.{module}.weight" for module in base.linear_shapes}
    return None if match[2] in linear else base.layer_shapes.get(match[2])


def require_full(ref: TensorRef, name: str, base: ModelSpec, where: str) -> None:
    """Raise AdapterError unless `ref` can replace the base's tensor `name`."""
    shape = full_shape(name, base)
    if shape is None:
        raise AdapterError(
            f"{where}: {name[:200]!r} cannot be replaced as a whole; a delta can replace only norms, biases, "
            "embedding and head of the base"
        )
    require_float(ref, where)
    require_shape(ref, shape, where)


def require_shape(ref: TensorRef, shape: tuple[int, ...], where: str) -> None:
    """Raise AdapterError if the tensor has another shape."""
    if ref.shape != shape:
        raise AdapterError(
            f"{where}: {ref.name[:200]} has shape {ref.shape}, but this base needs {shape}; "
            "register the variant with the base that it was made for"
        )


def require_float(ref: TensorRef, where: str) -> None:
    """Raise AdapterError if the tensor is not floating point."""
    if ref.dtype not in FLOAT_DTYPES:
        raise AdapterError(
            f"{where}: expected {ref.name[:200]} to have a dtype of {', '.join(sorted(FLOAT_DTYPES))}, got "
            f"{ref.dtype}"
        )


def merged_facts(base: ModelSpec, named_facts: Iterable[tuple[str, ModuleFacts]]) -> dict[str, ModuleFacts]:
    """The largest values for each kind of module, in the base's order, from the facts of single modules."""
    by_kind: dict[str, list[ModuleFacts]] = {}
    for name, facts in named_facts:
        by_kind.setdefault(short_name(name), []).append(facts)
    return {module: _largest(by_kind[module]) for module in base.linear_shapes if module in by_kind}


def _largest(facts: list[ModuleFacts]) -> ModuleFacts:
    return ModuleFacts(
        size_bytes=max(f.size_bytes for f in facts),
        rank=max(f.rank for f in facts),
        factors=max(f.factors for f in facts),
        block_size=max(f.block_size for f in facts),
    )


def total_bytes(refs: Iterable[TensorRef]) -> int:
    return sum(ref.size_bytes for ref in refs)
