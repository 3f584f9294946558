"""Why an adapter's tensor is not a matrix of a served kind, and what the adapter's owner can do."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from profiler.advice import merge, quoted, rename_biases, rename_tensors
from profiler.files import is_file, shown
from profiler.types import ModelSpec, TensorRef
from profiler.variants.told_ranks import kinds, ranks_as_config, stored_ranks

# Placeholders in messages until the folder is known: `told_of` replaces them with the folder's own.
MERGE = "<how to merge the adapter into its base>"
MERGE_TOKENS = "<how to merge it if tokens may have been added>"
MERGE_ROWS = "<how to merge it with {} rows>"
_MERGE_ROWS = re.compile(r"<how to merge it with (\d+) rows>")
RENAME_BIASES = "<how to rename the biases>"
RANKS = "<the ranks of the modules>"
MODULES = "<the names of the modules>"
TRAINED_ON = "the base that it was trained on"
RENAME = "<how to rename: {} -> {}>"
_RENAME = re.compile(r"<how to rename: (\S*) -> (\S*)>")
CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
OWN_TOKENIZER = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json")


def told_of(folder: Path, message: str, raw: Mapping[str, Any]) -> str:
    """The message for the owner of `folder`, whose config is `raw`: with its path and commands for it."""
    own = any(is_file(folder / name) for name in OWN_TOKENIZER)
    name = raw.get("base_model_name_or_path")
    trained_on = f"{TRAINED_ON} ({CONFIG} names {shown(name)})" if name else TRAINED_ON
    text = message.replace(MERGE, _merging(folder, own)).replace(TRAINED_ON, trained_on)
    text = text.replace(MERGE_TOKENS, _merging(folder, own, "if tokens were added for the training, "))
    text = _MERGE_ROWS.sub(lambda found: _merging(folder, own, "", int(found[1])), text)
    text = text.replace(RENAME_BIASES, rename_biases(folder / WEIGHTS))
    if RANKS in text or MODULES in text:
        ranks = stored_ranks(folder, WEIGHTS)
        text = text.replace(RANKS, f"write {ranks_as_config(ranks)}, as {WEIGHTS} shows")
        text = text.replace(MODULES, _naming(kinds(ranks)))
    text = _RENAME.sub(lambda found: rename_tensors(folder, (WEIGHTS,), found[1], found[2]), text)
    return f"{folder}/{text}" if text.startswith((f"{CONFIG}: ", f"{WEIGHTS}: ")) else text


def _merging(folder: Path, own: bool, when: str | None = None, rows: int | None = None) -> str:
    """How to merge the adapter; with `when`, its own tokenizer has tokens that the base's lacks."""
    then = ""
    if when is not None and not own:
        merged = quoted(folder, "-merged")
        then = (
            f"{when}copy tokenizer.json and tokenizer_config.json of the training (ask the adapter's author) "
            f"into {merged}, "
        )
    command = merge(folder, own_tokenizer=own, rows=rows, then=then)
    return f"merge the adapter into its base and register the result: {command}"


def _naming(modules: list[str]) -> str:
    """How to write a pattern without an expression."""
    having = f" (this adapter has {', '.join(modules)})" if modules else ""
    return (
        f"replace the pattern by the modules that it names{having}, each with the pattern's number, such as "
        f'"{modules[0] if modules else "q_proj"}": 8, or "layers.0.self_attn.q_proj": 8 for a single layer'
    )


def _renaming(old: str, new: str) -> str:
    return f"{RENAME.format(old, new)}, and register the adapter again"


PREFIX = "base_model.model."
_WHOLE = re.compile(r".*?(embed_tokens|lm_head|embed_out|wte)(\.base_layer)?\.weight")

Test = Callable[[str], bool]


def meaning(ref: TensorRef, base: ModelSpec) -> str | None:
    """What `ref` is and what to do, as the continuation of a message after its name; None if unknown."""
    if 0 in ref.shape:
        return (
            "is empty: the adapter was saved under DeepSpeed ZeRO-3 before its parts were gathered; write "
            '"stage3_gather_16bit_weights_on_model_save": true in zero_optimization of the DeepSpeed '
            "config, load the last checkpoint, and save the adapter again with save_pretrained; if you "
            "downloaded the adapter, ask its author to do this, or choose another adapter: this file has no "
            "weights"
        )
    if ref.name.endswith(".bias") and ".base_layer." not in ref.name:
        return _bias(ref.name, base)
    if match := _WHOLE.fullmatch(ref.name):
        return _table(ref, match[1], match[2] is not None, base)
    return next((text for test, text in _MEANINGS if test(ref.name)), None)


def _table(ref: TensorRef, name: str, wrapped: bool, base: ModelSpec) -> str:
    """The message for a whole embedding or head; PEFT stores it if it was trained, resized or wrapped."""
    what = "the base's head" if name in ("lm_head", "embed_out") else "the base's embedding"
    if ref.shape[:1] != (base.vocab_size,):
        return (
            f"is {what} with {ref.shape[0] if ref.shape else 0} rows, but this base has {base.vocab_size}: "
            "tokens were added for the training (resize_token_embeddings); "
            f"{MERGE_ROWS.format(ref.shape[0]) if ref.shape else MERGE_TOKENS}"
        )
    if wrapped:
        return (
            f"is {what}, which PEFT stores together with an adapter of it, but adapters of the embedding or "
            f"the head are not served; {MERGE}"
        )
    return (
        f"is {what} as a whole, trained or saved with the adapter, which is not served; {MERGE_TOKENS}. "
        "This works whether or not the tensor was trained. If you know that it was not, you can also save "
        "the adapter again with `model.save_pretrained(folder, save_embedding_layers=False)`"
    )


def _bias(name: str, base: ModelSpec) -> str:
    """The message for a bias under the name that PEFT gave to it before 0.6, or of a module without LoRA."""
    if re.sub(r".*\.layers\.\d+\.", "", name) not in base.layer_shapes:
        return f"is a trained bias, but this base has no bias there; register the adapter with {TRAINED_ON}"
    return (
        f"is a trained bias, which is not served with LoRA; first run {RENAME_BIASES}, which gives such "
        f"biases the names that PEFT reads, then {MERGE}"
    )


def _has(*parts: str) -> Test:
    return lambda name: any(part in name for part in parts)


def _begins(*prefixes: str) -> Test:
    return lambda name: name.startswith(prefixes)


_FROM_TRAINING = (
    "copy this entry from adapter_config.json in the output folder of the training, or ask the adapter's "
    "author for it (or for the merged model)"
)
_MEANINGS: tuple[tuple[Test, str], ...] = (
    (
        _has(".lora_magnitude_vector"),
        "belongs to DoRA, which rescales the base's rows and is not served, and PEFT would leave it out, "
        "because "
        f'adapter_config.json lacks use_dora; write "use_dora": true there, then {MERGE}',
    ),
    (
        _has(".lora_diag"),
        "belongs to KaSA, which also changes the base's weights and is not served, and PEFT would leave it "
        f"out, because adapter_config.json lacks kasa_config; {_FROM_TRAINING}, then {MERGE}",
    ),
    (
        _has(".lora_velora"),
        "belongs to VeLoRA, which is not served, and PEFT would leave it out, because adapter_config.json "
        f"lacks velora_config; {_FROM_TRAINING}, then {MERGE}",
    ),
    (_has(".lora_E", ".ranknum"), f"belongs to AdaLoRA, which is not served; {MERGE}"),
    (_has(".lora_embedding_"), f"is an adapter of the embedding, which is not served; {MERGE}"),
    (_has("lm_head.lora_", "embed_out.lora_"), f"is an adapter of the head, which is not served; {MERGE}"),
    (
        _has("trainable_tokens", "token_adapter"),
        "holds trained rows of the embedding (trainable_token_indices), which are not served; "
        f"{MERGE_TOKENS}",
    ),
    (
        _has(".modules_to_save.", ".original_module."),
        f"is a module that was trained as a whole (modules_to_save), which is not served; {MERGE_TOKENS}",
    ),
    (
        _has(".score.", ".classifier.", ".summary.", ".v_head."),
        "is the head of a classifier or a reward model, which is not served; choose an adapter for "
        "generating text (task_type CAUSAL_LM)",
    ),
    (
        _has("_orig_mod."),
        "was saved from a model compiled by torch.compile, which puts _orig_mod. into every name; remove "
        f"_orig_mod. from the names: {_renaming('_orig_mod.', '')}",
    ),
    (
        _has(".default.weight"),
        "has the adapter's name (default) in its name, because the file comes from the model's state_dict(), "
        f"not from save_pretrained; remove .default from the names: {_renaming('.default.', '.')}",
    ),
    (
        _has("vision_tower.", "vision_model.", ".visual.", "multi_modal_projector."),
        "adapts the part of a model that reads images, which is not served; train again with "
        "target_modules that name layers of the language model only",
    ),
    (
        _has("language_model."),
        "was trained on the language model of a model for text and images; if this base is the language "
        f"model of {TRAINED_ON}, remove language_model. from the names: {_renaming('language_model.', '')}; "
        "if it is not, or if you do not know, choose an adapter that was trained on this base",
    ),
    (_has(".experts."), f"adapts experts of a mixture, which is not served; {MERGE}"),
    (
        _has("lora_down", "lora_up", "lora_unet", "lora_te"),
        "has a name that trainers of image models use; only adapters of language models, saved by PEFT, are "
        "served: choose such an adapter",
    ),
    (_has(".base_layer."), f"is a weight of the base, stored together with the adapter; {MERGE}"),
    (_has("norm.weight"), f"is a norm as a whole, which is not served with LoRA; {MERGE}"),
    (
        _begins("base_model.model.layers.", "base_model.model.h."),
        "lacks model. in its name, because the adapter was trained on a model of AutoModel; put model. into "
        f"the names: {_renaming(PREFIX, f'{PREFIX}model.')}; the next time, train on AutoModelForCausalLM",
    ),
    (
        _begins("model.", "layers.", "transformer."),
        f"lacks PEFT's prefix; put {PREFIX} before every name: {_renaming('', PREFIX)}",
    ),
    (
        _begins(f"{PREFIX}transformer.", f"{PREFIX}gpt_neox."),
        f"belongs to another family of models; register the adapter with {TRAINED_ON}",
    ),
)
