"""Why an adapter's tensor is not a matrix of a served kind, and what the adapter's owner can do."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from profiler.advice import merge, rename_tensors
from profiler.files import is_file, shown
from profiler.types import ModelSpec, TensorRef

# Placeholders in messages until the folder is known: `told_of` replaces them with the folder's own.
MERGE = "<how to merge the adapter into its base>"
TRAINED_ON = "the base that it was trained on"
RENAME = "<how to rename: {} -> {}>"
_RENAME = re.compile(r"<how to rename: (\S*) -> (\S*)>")
CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
OWN_TOKENIZER = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json")


def told_of(folder: Path, message: str, raw: Mapping[str, Any]) -> str:
    """The message for the owner of `folder`, whose config is `raw`: with its path and commands for it."""
    own = any(is_file(folder / name) for name in OWN_TOKENIZER)
    merged = f"merge the adapter into its base and register the result: {merge(folder, own_tokenizer=own)}"
    name = raw.get("base_model_name_or_path")
    trained_on = f"{TRAINED_ON} ({CONFIG} names {shown(name)})" if name else TRAINED_ON
    text = message.replace(MERGE, merged).replace(TRAINED_ON, trained_on)
    text = _RENAME.sub(lambda found: rename_tensors(folder, (WEIGHTS,), found[1], found[2]), text)
    return f"{folder}/{text}" if text.startswith((f"{CONFIG}: ", f"{WEIGHTS}: ")) else text


def _renaming(old: str, new: str) -> str:
    return f"{RENAME.format(old, new)}, and register it again"


PREFIX = "base_model.model."
_WHOLE = re.compile(r".*?(embed_tokens|lm_head|embed_out|wte)(\.base_layer)?\.weight")

Test = Callable[[str], bool]


def meaning(ref: TensorRef, base: ModelSpec) -> str | None:
    """What `ref` is and what to do, as the continuation of a message after its name; None if unknown."""
    if 0 in ref.shape:
        return (
            "is empty: the adapter was saved under DeepSpeed ZeRO-3 before its parts were gathered; write "
            '"stage3_gather_16bit_weights_on_model_save": true in zero_optimization of the DeepSpeed '
            "config, load the last checkpoint, and save the adapter again with save_pretrained"
        )
    if match := _WHOLE.fullmatch(ref.name):
        return _table(ref, match[1], match[2] is not None, base)
    return next((text for test, text in _MEANINGS if test(ref.name)), None)


def _table(ref: TensorRef, name: str, wrapped: bool, base: ModelSpec) -> str:
    """The message for a whole embedding or head; PEFT stores it if it was trained, resized or wrapped."""
    what = "the base's head" if name in ("lm_head", "embed_out") else "the base's embedding"
    if ref.shape[:1] != (base.vocab_size,):
        return (
            f"is {what} with {ref.shape[0] if ref.shape else 0} rows, where this base has {base.vocab_size}: "
            f"tokens were added for the training (resize_token_embeddings); {MERGE}"
        )
    if wrapped:
        return (
            f"is {what}, which PEFT stores beside an adapter of it, and an adapter of the embedding or the "
            f"head is not served; {MERGE}"
        )
    return (
        f"is {what} as a whole, trained or saved beside the adapter, which is not served; if it was not "
        "trained, save the adapter again with `model.save_pretrained(folder, save_embedding_layers=False)`, "
        f"else {MERGE}"
    )


def _has(*parts: str) -> Test:
    return lambda name: any(part in name for part in parts)


def _begins(*prefixes: str) -> Test:
    return lambda name: name.startswith(prefixes)


def _ends(*endings: str) -> Test:
    return lambda name: name.endswith(endings)


_MEANINGS: tuple[tuple[Test, str], ...] = (
    (
        _has(".lora_magnitude_vector"),
        "is of DoRA, which rescales the base's rows and is not served, and PEFT would leave it out, because "
        f'adapter_config.json does not say so; write "use_dora": true there, then {MERGE}',
    ),
    (
        _has(".lora_diag"),
        "is of KaSA, which also changes the base's weights and is not served, and PEFT would leave it "
        "out, because adapter_config.json lacks kasa_config; copy that from the config of the training, then "
        f"{MERGE}",
    ),
    (
        _has(".lora_velora"),
        "is of VeLoRA, which is not served, and PEFT would leave it out, because adapter_config.json "
        f"lacks velora_config; copy that from the config of the training, then {MERGE}",
    ),
    (_has(".lora_E", ".ranknum"), f"is of AdaLoRA, which is not served; {MERGE}"),
    (_has(".lora_embedding_"), f"is an adapter of the embedding, which is not served; {MERGE}"),
    (_has("lm_head.lora_", "embed_out.lora_"), f"is an adapter of the head, which is not served; {MERGE}"),
    (
        _has("trainable_tokens", "token_adapter"),
        f"holds trained rows of the embedding (trainable_token_indices), which are not served; {MERGE}",
    ),
    (
        _has(".modules_to_save.", ".original_module."),
        f"is a module that was trained as a whole (modules_to_save), which is not served; {MERGE}",
    ),
    (
        _has(".score.", ".classifier.", ".summary.", ".v_head."),
        "is the head of a classifier or a reward model, which is not served; choose an adapter for "
        "generating text (task_type CAUSAL_LM)",
    ),
    (
        _has("_orig_mod."),
        "was saved from a model compiled by torch.compile, which puts _orig_mod. into every name; take it "
        f"out of the names: {_renaming('_orig_mod.', '')}",
    ),
    (
        _has(".default.weight"),
        "has the adapter's own name (default) in it: it comes from the model's state_dict(), not from "
        f"save_pretrained; take .default out of the names: {_renaming('.default.', '.')}",
    ),
    (
        _has("vision_tower.", "vision_model.", ".visual.", "multi_modal_projector."),
        "adapts the part of a model that reads images, which is not served; train again with "
        "target_modules that name layers of the language model only",
    ),
    (
        _has("language_model."),
        "was trained on a model for text and images, whose language model has these names; if this base is "
        f"that language model, take language_model. out of the names: {_renaming('language_model.', '')}; if "
        "not, train the adapter on this base",
    ),
    (_has(".experts."), f"adapts experts of a mixture, which is not served; {MERGE}"),
    (
        _has("lora_down", "lora_up", "lora_unet", "lora_te"),
        "has a name that trainers of image models use; only adapters of language models, saved by PEFT, are "
        "served: choose such an adapter",
    ),
    (_has(".base_layer."), f"is a weight of the base, stored beside the adapter of it; {MERGE}"),
    (
        _ends(".bias"),
        "is a trained bias, which is not served with LoRA, and PEFT would leave it out, because "
        'adapter_config.json says bias "none"; write the value of the training there (all or lora_only), '
        f"then {MERGE}",
    ),
    (_has("norm.weight"), f"is a norm as a whole, which is not served with LoRA; {MERGE}"),
    (
        _begins("base_model.model.layers.", "base_model.model.h."),
        "lacks a model. in its name, because the adapter was trained on a model of AutoModel; put it into "
        f"the names: {_renaming(PREFIX, f'{PREFIX}model.')}; the next time, train on AutoModelForCausalLM",
    ),
    (
        _begins("model.", "layers.", "transformer."),
        f"lacks PEFT's prefix; put {PREFIX} before every name: {_renaming('', PREFIX)}",
    ),
    (
        _begins(f"{PREFIX}transformer.", f"{PREFIX}gpt_neox."),
        f"is of another family of models; register the adapter with {TRAINED_ON}",
    ),
)
