"""What it means when a checkpoint's tensors are not those that its config implies, and what its owner can do.

Every message names what was found, says what wrote it, and how to get files that can be served.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from profiler.architectures.description import Description, Shapes
from profiler.files import shown
from profiler.types import TensorRef

Tensors = Mapping[str, TensorRef]

# Endings of tensors' names that only quantized checkpoints have, and who writes them.
QUANTIZED_ENDINGS = {
    ".qweight": "GPTQ or AWQ",
    ".qzeros": "GPTQ or AWQ",
    ".weight_packed": "compressed-tensors",
    ".weight_scale": "compressed-tensors or ModelOpt",
    ".weight_scale_inv": "fp8 in blocks",
    ".input_scale": "fp8 with scales of activations",
    ".absmax": "bitsandbytes",
    ".quant_map": "bitsandbytes",
    ".SCB": "bitsandbytes",
}
QUANTIZED_DTYPES = frozenset({"F8_E4M3", "F8_E5M2", "F8_E8M0", "I8", "U8", "I32"})
UNQUANTIZED = (
    "quantized checkpoints are not served: register the unquantized one (16 bits) that it was made from, "
    "which its model card names; Ostinato can quantize that itself (`ostinato register NAME FOLDER "
    "--compression fp8=100`)"
)
SETTINGS = ("hf_quant_config.json", "quantize_config.json", "quant_config.json")  # beside older checkpoints


def quantized_by(tensors: Tensors) -> str | None:
    """Which tensor shows that a checkpoint is quantized, and by what; None if none does."""
    for name in sorted(tensors):
        ending = next((e for e in QUANTIZED_ENDINGS if name.endswith(e) or f"{e}." in name), None)
        if ending is not None:
            return f"{name} ({QUANTIZED_ENDINGS[ending]})"
    return next(
        (
            f"{name} (of type {ref.dtype})"
            for name, ref in sorted(tensors.items())
            if ref.dtype in QUANTIZED_DTYPES
        ),
        None,
    )


def quantization_problem(folder: Path, key: str, settings: Any, tensors: Tensors) -> str:
    """What to say of a config that has settings for quantized weights under `key`."""
    where = folder / "config.json"
    method = settings.get("quant_method") if isinstance(settings, dict) else settings
    by = f"quantized by {shown(method)}" if method else "quantized by an unnamed method"
    if quantized_by(tensors) is None:
        return (
            f"{where}: {key} says that the weights are {by}, but they are stored unquantized, so it was left "
            f"in by mistake (merging an adapter does that); take {key} out of config.json and register again"
        )
    return f"{where} describes a checkpoint {by} ({key}); {UNQUANTIZED}"


def problem(description: Description, expected: Shapes, tensors: Tensors, folder: Path) -> str | None:
    """Why the checkpoint in `folder` is not what its config describes; None if it is.

    `expected` are the shapes of all tensors that its engine needs.
    """
    missing, extra = expected.keys() - tensors.keys(), tensors.keys() - expected.keys()
    odd = {name for name in extra if not _ignored(name, description)}
    for known in (_renamed, _quantized, _known_extras, _resized):
        if (missing or odd or known is _resized) and (found := known(description, expected, tensors, folder)):
            return found
    if missing:
        return (
            f"{len(missing)} of the {len(expected)} tensors that config.json implies are missing in "
            f"{folder}, such as {_some(missing)}; download all of the model's files again, or correct "
            "config.json if it is another model's"
        )
    return _unknown(odd, description, folder) if odd else None


# Stored rotary tables, which engines compute for themselves.
ROTARY = ("rotary_emb.inv_freq", "rotary_emb.cos_cached", "rotary_emb.sin_cached")


def _ignored(name: str, description: Description) -> bool:
    """Engines skip stored rotary tables and causal masks, and a stored head when it is tied."""
    if description.tied and name == description.head:
        return True
    return name.endswith((*ROTARY, *(f".{ending}" for ending in description.skipped)))


def _some(names: Collection[str]) -> str:
    return ", ".join(sorted(names)[:2])


def _renamed(description: Description, expected: Shapes, tensors: Tensors, folder: Path) -> str | None:
    """All tensors have the right names, but for something before them."""
    for match, meaning in _RENAMED:
        wrong = [name for name in tensors.keys() - expected.keys() if match(name)]
        if wrong and not expected.keys() <= tensors.keys():
            file = tensors[min(wrong)].file
            return f"{folder}: {file} has tensors named {_some(wrong)}: {meaning}"
    return None


def _starts(*prefixes: str) -> Callable[[str], bool]:
    return lambda name: name.startswith(prefixes)


_RENAMED: tuple[tuple[Callable[[str], bool], str], ...] = (
    (
        _starts("_orig_mod."),
        "they were saved from a model compiled by torch.compile, which puts _orig_mod. before every name; "
        "take _orig_mod. out of the names, or save model._orig_mod with save_pretrained",
    ),
    (
        _starts("module."),
        "they were saved from a model wrapped by DataParallel, which puts module. before every name; take "
        "module. out of the names, or save model.module with save_pretrained",
    ),
    (
        lambda name: ".lora_A." in name or name.startswith("base_model.model."),
        "they were saved from a model with a PEFT adapter in it; merge the adapter with merge_and_unload() "
        "and save that with save_pretrained, or save the adapter alone and register it as a variant",
    ),
    (
        _starts("model.language_model.", "language_model."),
        "they are of a model for text and images; load its language model alone (for Gemma 3 with "
        "Gemma3ForCausalLM) and save that with save_pretrained, or register the text-only model of its "
        "family",
    ),
    (
        _starts("layers.", "embed_tokens.", "h.", "embed_out"),
        "they lack the prefix that a model for generating text has: AutoModel saved them, which leaves the "
        "head out. If config.json says tie_word_embeddings true, load the folder with AutoModelForCausalLM "
        "and save it with save_pretrained; else the head is lost (loading would make up a random one): get "
        "the model with its head. Embedding models are not served",
    ),
    (
        _starts("tok_embeddings."),
        "they are Meta's or Mistral's own names; download the files for transformers, or convert these with "
        "the model's conversion script of transformers",
    ),
    (
        lambda name: name.endswith((".mlp.experts.gate_up_proj", ".mlp.experts.down_proj")),
        "all experts of a layer are fused in one tensor, as transformers 5 holds them in memory; save the "
        "model with save_pretrained(folder, save_original_format=True)",
    ),
)


def _quantized(description: Description, expected: Shapes, tensors: Tensors, folder: Path) -> str | None:
    by = quantized_by(tensors)
    if by is None:
        return None
    beside = next((name for name in SETTINGS if (folder / name).is_file()), None)
    told = f" ({beside} says how)" if beside else ""
    return f"{folder} holds a quantized checkpoint{told}, as its tensor {by} shows; {UNQUANTIZED}"


KV_SCALE = re.compile(r".*\.(k_scale|v_scale|k_proj\.output_scale|v_proj\.output_scale)")


def _known_extras(description: Description, expected: Shapes, tensors: Tensors, folder: Path) -> str | None:
    extra = tensors.keys() - expected.keys()
    for match, meaning in _EXTRAS:
        if found := {name for name in extra if match(name)}:
            return f"{folder}: {tensors[min(found)].file} holds {_some(found)}: {meaning}"
    return None


_EXTRAS: tuple[tuple[Callable[[str], bool], str], ...] = (
    (
        lambda name: KV_SCALE.fullmatch(name) is not None,
        "scales for a KV cache in fp8, which is not served; register the checkpoint that they were added "
        "to, or take every k_scale and v_scale out of the files and their index",
    ),
    (
        _starts("v_head.", "value_head."),
        "the value head of TRL, with which a model is trained by PPO and which generates nothing; load "
        "it with AutoModelForCausalLMWithValueHead and save model.pretrained_model with save_pretrained",
    ),
    (
        _starts("score.", "classifier.", "summary."),
        "the head of a classifier; models that classify are not served, only those that generate text",
    ),
    (
        _starts("vision_tower.", "multi_modal_projector.", "model.vision_tower.", "visual."),
        "the part of a model that reads images, which is not served; save its language model alone",
    ),
    (
        lambda name: ".lora_A." in name or ".lora_B." in name,
        "an adapter's matrices among the model's; merge them with merge_and_unload() and save that",
    ),
)


def _resized(description: Description, expected: Shapes, tensors: Tensors, folder: Path) -> str | None:
    """The embedding has more or fewer rows than the config says."""
    ref = tensors.get(description.embedding)
    if ref is None or len(ref.shape) != 2 or ref.shape == expected[description.embedding]:
        return None
    if ref.shape[1] != description.hidden:
        return None
    head = tensors.get(description.head)
    if head is not None and head.shape != ref.shape:
        return (
            f"{description.embedding} in {folder} has {ref.shape[0]} rows, {description.head} has "
            f"{head.shape[0]} and config.json says vocab_size {description.vocab}: tokens were added to one "
            "of the two; download the model again, or resize both where it was trained "
            "(resize_token_embeddings, with tokens of the head trained, too) and save it with save_pretrained"
        )
    return (
        f"{description.embedding} in {folder} has {ref.shape[0]} rows, but config.json says vocab_size "
        f"{description.vocab}: the vocabulary was resized (resize_token_embeddings), and the config is from "
        f"before; set vocab_size to {ref.shape[0]} in config.json if the tokenizer is the resized one, too"
    )


def _unknown(odd: Collection[str], description: Description, folder: Path) -> str:
    return (
        f"{folder} holds {len(odd)} tensors that a {description.layers}-layer {description.architecture} "
        f"does not have, such as {_some(odd)}; correct config.json if it is another model's, or save the "
        "model again with save_pretrained, which leaves them out"
    )
