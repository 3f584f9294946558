"""Why a checkpoint's tensors differ from those that its config implies, and what its owner can do.

Every message names what was found, which program wrote it, and how to get files that can be served.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from profiler import advice
from profiler.architectures.description import Description, Shapes
from profiler.architectures.registry import TEXT_ONLY
from profiler.files import shown
from profiler.types import TensorRef

Tensors = Mapping[str, TensorRef]

# Endings of tensor names that only quantized checkpoints have, and the programs that write them.
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
    "quantized checkpoints are not served: register the original model in 16 bits, which the checkpoint's "
    'page on Hugging Face names ("Base model"): `hf download REPO --local-dir FOLDER`, then '
    "`ostinato register NAME FOLDER` (with `--compression fp8=100` Ostinato serves it quantized to fp8)"
)
SETTINGS = ("hf_quant_config.json", "quantize_config.json", "quant_config.json")  # in older checkpoints


def quantized_by(tensors: Tensors) -> str | None:
    """The tensor that shows that a checkpoint is quantized, and by which program; None if none does."""
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
    """The message for a config that has settings for quantized weights under `key`."""
    where = folder / "config.json"
    method = settings.get("quant_method") if isinstance(settings, dict) else settings
    by = f"quantized by {shown(method)}" if method else "quantized by an unnamed method"
    if quantized_by(tensors) is None:
        return (
            f"{where}: {key} says that the weights are {by}, but they are unquantized, so {key} was left in "
            f"by mistake (merging an adapter does that); delete {key} and its value {{...}} from that "
            "file, and register the model again"
        )
    return f"{where} describes a checkpoint {by} ({key}); {UNQUANTIZED}"


def problem(description: Description, expected: Shapes, tensors: Tensors, folder: Path) -> str | None:
    """Why the checkpoint in `folder` does not match its config; None if it does.

    `expected` are the shapes of all tensors that its engine needs.
    """
    missing, extra = expected.keys() - tensors.keys(), tensors.keys() - expected.keys()
    odd = {name for name in extra if not _ignored(name, description)}
    for known in (_renamed, _quantized, _known_extras, _resized):
        if (missing or odd or known is _resized) and (found := known(description, expected, tensors, folder)):
            return found
    if missing:
        return (
            f"{len(missing)} of the {len(expected)} tensors of the model in config.json are missing in "
            f"{folder}, such as {_some(missing)}: the weights are incomplete, or config.json belongs to "
            f"another model; download both again: {advice.download(folder)}; or, for a model that you "
            "trained, save it again with save_pretrained, which writes both"
        )
    return _unknown(odd, description, folder) if odd else None


# Stored rotary tables, which engines compute themselves.
ROTARY = ("rotary_emb.inv_freq", "rotary_emb.cos_cached", "rotary_emb.sin_cached")


def _ignored(name: str, description: Description) -> bool:
    """Whether engines skip the tensor: stored rotary tables, causal masks, and a stored head that is tied."""
    if description.tied and name == description.head:
        return True
    return name.endswith((*ROTARY, *(f".{ending}" for ending in description.skipped)))


def _some(names: Collection[str]) -> str:
    return ", ".join(sorted(names)[:2])


def _renamed(description: Description, expected: Shapes, tensors: Tensors, folder: Path) -> str | None:
    """All tensors have the right names, except for a prefix."""
    found = _Found(folder, description, expected, tensors)
    for match, meaning in _RENAMED:
        wrong = [name for name in tensors.keys() - expected.keys() if match(name)]
        if wrong and not expected.keys() <= tensors.keys():
            file = tensors[min(wrong)].file
            return f"{folder}: {file} has tensors named {_some(wrong)}: {meaning(found)}"
    return None


def _starts(*prefixes: str) -> Callable[[str], bool]:
    return lambda name: name.startswith(prefixes)


@dataclass(frozen=True)
class _Found:
    """A checkpoint whose tensors do not match its config."""

    folder: Path
    description: Description
    expected: Shapes
    tensors: Tensors

    def renaming(self, old: str, new: str) -> str:
        files = {ref.file for ref in self.tensors.values()}
        return advice.rename_tensors(self.folder, files, old, new)

    def others(self, old: str, new: str) -> list[str]:
        """The tensors that the model would not have if `old` in their names were replaced by `new`."""
        renamed = {name: name.replace(old, new, 1) for name in self.tensors}
        return sorted(
            name
            for name, mended in renamed.items()
            if mended not in self.expected and not _ignored(mended, self.description)
        )


Meaning = Callable[[_Found], str]


def _fixed(text: str) -> Meaning:
    return lambda found: text


def _prefixed(old: str, origin: str, lost: str, saving: str) -> Meaning:
    return lambda found: (
        f"{origin}; remove {old} from the names{lost}: {found.renaming(old, '')}, and register the model "
        f"again, or, where the model was trained, save it again with `{saving}`"
    )


_IMAGES = (
    "they belong to a model for text and images, which is not served; register a text-only model, such as "
    f"{TEXT_ONLY}"
)


def _of_images(old: str, new: str) -> Meaning:
    def meaning(found: _Found) -> str:
        if others := found.others(old, new):
            return f"{_IMAGES} (these files have more than a language model: {others[0]})"
        return (
            "they belong to the language model of a model for text and images, and these files have nothing "
            f"else; rename the tensors: {found.renaming(old, new)}, and register the model again"
        )

    return meaning


def _with_adapter(found: _Found) -> str:
    folder = found.folder
    return (
        "they were saved from a model with a PEFT adapter in it; where the model was trained, save the "
        f"merged model with `model.merge_and_unload().save_pretrained('{folder}-merged')`, or the adapter "
        f"alone with `model.save_pretrained('{folder}-adapter')`, and register the adapter as a variant of "
        "its base"
    )


def _without_head(found: _Found) -> str:
    saved = "AutoModel saved them without the head for generating text. "
    if found.description.tied:
        return (
            f"{saved}This model's head is its embedding (tie_word_embeddings), so nothing is lost; save the "
            f"model again with AutoModelForCausalLM: {advice.save_again(found.folder)}. Models for "
            "embeddings are not served"
        )
    return (
        f"{saved}The head is not in these files, and downloading them again brings none; if the model was "
        f"trained to generate text, add the head of its base: {advice.with_head(found.folder)} (BASE is the "
        "model that the training began with; the model's page or author names it). A model for embeddings is "
        "not served: choose another model"
    )


def _own_names(found: _Found) -> str:
    folder = found.folder.with_name(f"{found.folder.name}-hf")
    return (
        "they are Meta's or Mistral's own names, which Ostinato does not read; download the repository in "
        f"the format of transformers, whose name often ends in -hf: {advice.download(folder)}, or convert "
        "these files with the script convert_*_weights_to_hf.py of transformers' repository on GitHub"
    )


def _fused_experts(found: _Found) -> str:
    return (
        "each tensor has all experts of a layer, as transformers 5 keeps them in memory; write a copy with "
        f"a tensor per expert: {advice.split_experts(found.folder)}"
    )


_RENAMED: tuple[tuple[Callable[[str], bool], Meaning], ...] = (
    (
        _starts("_orig_mod."),
        _prefixed(
            "_orig_mod.",
            "they were saved from a model compiled by torch.compile, which puts _orig_mod. before every name",
            "",
            "model._orig_mod.save_pretrained(folder)",
        ),
    ),
    (
        _starts("module."),
        _prefixed(
            "module.",
            "they were saved from a model wrapped by DataParallel, which puts module. before every name",
            "",
            "model.module.save_pretrained(folder)",
        ),
    ),
    (lambda name: ".lora_A." in name, _with_adapter),
    (
        _starts("base_model.model."),
        _prefixed(
            "base_model.model.",
            "they were saved from a model wrapped by PEFT, which puts base_model.model. before every name",
            ", which loses nothing, because no tensor of an adapter is in these files",
            "model.merge_and_unload().save_pretrained(folder)",
        ),
    ),
    (_starts("model.language_model."), _of_images("model.language_model.", "model.")),
    (_starts("language_model.model."), _of_images("language_model.", "")),
    (_starts("language_model."), _fixed(_IMAGES)),
    (_starts("layers.", "embed_tokens.", "h.", "embed_out"), _without_head),
    (_starts("tok_embeddings."), _own_names),
    (lambda name: name.endswith((".mlp.experts.gate_up_proj", ".mlp.experts.down_proj")), _fused_experts),
)


def _quantized(description: Description, expected: Shapes, tensors: Tensors, folder: Path) -> str | None:
    by = quantized_by(tensors)
    if by is None:
        return None
    beside = next((name for name in SETTINGS if (folder / name).is_file()), None)
    told = f" (see {beside})" if beside else ""
    return f"{folder} has a quantized checkpoint{told}, as its tensor {by} shows; {UNQUANTIZED}"


KV_SCALE = re.compile(r".*\.(k_scale|v_scale|k_proj\.output_scale|v_proj\.output_scale)")


def _known_extras(description: Description, expected: Shapes, tensors: Tensors, folder: Path) -> str | None:
    found = _Found(folder, description, expected, tensors)
    for match, meaning in _EXTRAS:
        if names := {name for name in tensors.keys() - expected.keys() if match(name)}:
            return f"{folder}: {tensors[min(names)].file} has {_some(names)}: {meaning(found)}"
    return None


def _left_out(what: str) -> Meaning:
    """Tensors that transformers does not load; a saved copy does not have them."""
    return lambda found: f"{what}; write a copy without these tensors: {advice.save_again(found.folder)}"


_EXTRAS: tuple[tuple[Callable[[str], bool], Meaning], ...] = (
    (
        lambda name: KV_SCALE.fullmatch(name) is not None,
        _left_out("scales for a KV cache in fp8, which is not served"),
    ),
    (
        _starts("v_head.", "value_head."),
        _left_out("a value head of TRL, which only training by PPO needs"),
    ),
    (
        _starts("score.", "classifier.", "summary."),
        _fixed(
            "the head of a classifier; models that classify are not served: choose a model that generates "
            "text"
        ),
    ),
    (
        _starts("vision_tower.", "multi_modal_projector.", "model.vision_tower.", "visual."),
        _fixed(
            "the part of a model that reads images, which is not served; register a text-only model, such as "
            f"{TEXT_ONLY}"
        ),
    ),
    (lambda name: ".lora_A." in name or ".lora_B." in name, _with_adapter),
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
            f"{head.shape[0]}, and config.json says vocab_size {description.vocab}: tokens were added to "
            "only one of these, and engines cannot load this; where the model was trained, call "
            f"`model.resize_token_embeddings({max(ref.shape[0], head.shape[0])})`, which resizes both, and "
            "save it with save_pretrained; if you downloaded it, ask the model's author for such files, or "
            "register its base model, which its page names"
        )
    return (
        f"{description.embedding} in {folder} has {ref.shape[0]} rows, but config.json says vocab_size "
        f"{description.vocab}: the vocabulary was resized (resize_token_embeddings), but the config is "
        "older; "
        f'write "vocab_size": {ref.shape[0]} in {folder / "config.json"}, and register the model '
        f"again{_added_tokens(folder, description.vocab, ref.shape[0])}"
    )


def _added_tokens(folder: Path, before: int, rows: int) -> str:
    """How to tell whether the tokenizer in `folder` has the added tokens."""
    if rows <= before:
        return ""
    return (
        f". Its tokenizer should have more than {before} tokens: {advice.count_tokens(folder)} prints the "
        "number; if the number is not larger, copy the tokenizer's files from the output folder of the "
        "training, or ask the model's author for them"
    )


def _unknown(odd: Collection[str], description: Description, folder: Path) -> str:
    return (
        f"{folder} holds {len(odd)} tensors that a {description.layers}-layer {description.architecture} "
        f"does not have, such as {_some(odd)}; if config.json belongs to another model, copy the right "
        f"config.json; otherwise write a copy without these tensors: {advice.save_again(folder)}"
    )
