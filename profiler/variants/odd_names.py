"""What a tensor of an adapter is that is no matrix of a served kind, and what the adapter's owner can do."""

from __future__ import annotations

import re
from collections.abc import Callable

from profiler.types import ModelSpec, TensorRef

MERGE = (
    "merge the adapter into its base with PEFT (PeftModel.from_pretrained(base, folder).merge_and_unload(), "
    "then save_pretrained) and register the merged model"
)
PREFIX = "base_model.model."
_WHOLE = re.compile(r".*?(embed_tokens|lm_head|embed_out|wte)(\.base_layer)?\.weight")

Test = Callable[[str], bool]


def meaning(ref: TensorRef, base: ModelSpec) -> str | None:
    """What `ref` is and what to do, to follow its name in a message; None if nothing is known of it."""
    if 0 in ref.shape:
        return (
            "is empty: the adapter was saved under DeepSpeed ZeRO-3 before its parts were gathered; set "
            "stage3_gather_16bit_weights_on_model_save, or gather them with zero_to_fp32.py; save it again"
        )
    if match := _WHOLE.fullmatch(ref.name):
        return _table(ref, match[1], match[2] is not None, base)
    return next((text for test, text in _MEANINGS if test(ref.name)), None)


def _table(ref: TensorRef, name: str, wrapped: bool, base: ModelSpec) -> str:
    """The whole embedding or head, which PEFT stores when it was trained, resized or wrapped."""
    what = "the base's head" if name in ("lm_head", "embed_out") else "the base's embedding"
    if ref.shape[:1] != (base.vocab_size,):
        return (
            f"is {what} with {ref.shape[0] if ref.shape else 0} rows, where this base has {base.vocab_size}: "
            f"tokens were added for the training (resize_token_embeddings); {MERGE}"
        )
    if wrapped:
        return (
            f"is {what}, which PEFT stores beside an adapter of it; an adapter of the embedding or the head "
            f"is not served; {MERGE}"
        )
    return (
        f"is {what} as a whole, trained or saved beside the adapter, which is not served; if it was not "
        "trained, save the adapter again with save_pretrained(folder, save_embedding_layers=False), or else "
        f"{MERGE}"
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
        "is of DoRA, which rescales the base's rows and is not served; PEFT would leave it out, because "
        f"adapter_config.json does not say so: set use_dora to true there, then {MERGE}",
    ),
    (
        _has(".lora_diag"),
        "is of KaSA, which also changes the base's weights and is not served; PEFT would leave it out, "
        f"because adapter_config.json lacks kasa_config: put that back, then {MERGE}",
    ),
    (
        _has(".lora_velora"),
        "is of VeLoRA, which is not served; PEFT would leave it out, because adapter_config.json lacks "
        f"velora_config: put that back, then {MERGE}",
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
        "is the head of a classifier or a reward model; only adapters for generating text are served",
    ),
    (
        _has("_orig_mod."),
        "was saved from a model compiled by torch.compile, which puts _orig_mod. into every name; take it "
        "out of the names",
    ),
    (
        _has(".default.weight"),
        "has the adapter's own name (default) in it: it comes from the model's state_dict(); save the "
        "adapter with save_pretrained, or take .default out of the names",
    ),
    (
        _has("vision_tower.", "vision_model.", ".visual.", "multi_modal_projector."),
        "adapts the part of a model that reads images, which is not served; train without it",
    ),
    (
        _has("language_model."),
        "was trained on a model for text and images, whose language model has these names; if this base is "
        "that language model, take language_model. out of the names so that they begin with "
        "base_model.model.model.layers, or train on this base",
    ),
    (_has(".experts."), f"adapts experts of a mixture, which is not served; {MERGE}"),
    (
        _has("lora_down", "lora_up", "lora_unet", "lora_te"),
        "has a name that trainers of image models use; expected an adapter saved by PEFT",
    ),
    (_has(".base_layer."), f"is a weight of the base, stored beside the adapter of it; {MERGE}"),
    (
        _ends(".bias"),
        "is a trained bias, which is not served with LoRA; PEFT would leave it out, because "
        'adapter_config.json says bias "none": write the value of the training there (all or lora_only), '
        f"then {MERGE}",
    ),
    (_has("norm.weight"), f"is a norm as a whole, which is not served with LoRA; {MERGE}"),
    (
        _begins("base_model.model.layers.", "base_model.model.h."),
        "lacks a model. in its name, for the adapter was trained on a model of AutoModel; train it on "
        "AutoModelForCausalLM, or put model. after base_model.model. in the names",
    ),
    (
        _begins("model.", "layers.", "transformer."),
        "lacks PEFT's prefix: put base_model.model. before every name, or save the adapter with PEFT's "
        "save_pretrained",
    ),
    (
        _begins(f"{PREFIX}transformer.", f"{PREFIX}gpt_neox."),
        "is of another family of models; register the adapter with the base that it was trained on",
    ),
)
