"""Small folders of bases as hubs and trainers write them: each builder makes one of a tiny model.

`SERVED` maps a layout's name to its builder. A builder returns the folder, and a folder that transformers
reads as the same model where it cannot read the first. `REFUSED` adds the text that the message must contain:
the file or tensor, the reason and what to do.
"""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from testkit.tiny_families import SIZES, Tiny

Tensors = dict[str, torch.Tensor]
LLAMA = Tiny("Llama", SIZES)
QWEN = Tiny("Qwen2", {**SIZES, "tie_word_embeddings": True})
MISTRAL = Tiny("Mistral", SIZES)
MOE = Tiny("Qwen3Moe", {**SIZES, "num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 12})
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
POINTER = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'4d' * 32}\nsize 4976698672\n"


def plain(folder: Path, tiny: Tiny = LLAMA, **save: Any) -> Path:
    import transformers

    torch.manual_seed(len(str(folder.name)))
    model = getattr(transformers, tiny.architecture)(tiny.make_config())
    model.save_pretrained(folder, **save)
    (folder / "tokenizer.json").write_text("{}")
    return folder


def sharded(folder: Path, tiny: Tiny = LLAMA) -> Path:
    return plain(folder, tiny, max_shard_size="6KB")


def shards_of(folder: Path) -> list[Path]:
    return sorted(folder.glob("model-*.safetensors"))


def changed(folder: Path, change: Callable[[Tensors], Tensors]) -> Path:
    """The folder, with other tensors in model.safetensors."""
    tensors = change(load_file(folder / SINGLE))
    save_file({n: t.contiguous() for n, t in tensors.items()}, folder / SINGLE, metadata={"format": "pt"})
    return folder


def configured(folder: Path, *without: str, **changes: Any) -> Path:
    where = folder / "config.json"
    raw = {key: value for key, value in json.loads(where.read_text()).items() if key not in without}
    where.write_text(json.dumps({**raw, **changes}))
    return folder


def with_files(folder: Path, **files: str) -> Path:
    """`__` in a name stands for a dot."""
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)
    return folder


def stray(folder: Path, name: str, params: bool = False) -> Path:
    """A file with other weights of the same names (or, for Mistral's, of its own)."""
    held = load_file(folder / SINGLE) if (folder / SINGLE).exists() else {}
    for path in shards_of(folder):
        held |= load_file(path)
    other = {tensor: torch.randn_like(value) for tensor, value in held.items()}
    if name.startswith("consolidated"):
        other = {
            tensor.removeprefix("model.").replace("self_attn", "attention"): v for tensor, v in other.items()
        }
    save_file(other, folder / name, metadata={"format": "pt"})
    return with_files(folder, params__json="{}") if params else folder


def renamed(folder: Path, rename: Callable[[str], str]) -> Path:
    return changed(folder, lambda tensors: {rename(name): value for name, value in tensors.items()})


def added(folder: Path, **shapes: tuple[int, ...]) -> Path:
    """Further tensors; `__` in a name stands for a dot."""
    more = {name.replace("__", "."): torch.ones(shape) for name, shape in shapes.items()}
    return changed(folder, lambda tensors: {**tensors, **more})


def index_of(folder: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    raw = json.loads((folder / INDEX).read_text())
    change(raw)
    (folder / INDEX).write_text(json.dumps(raw))
    return folder


def header_of(folder: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    raw = (folder / SINGLE).read_bytes()
    length = struct.unpack("<Q", raw[:8])[0]
    header = json.loads(raw[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    (folder / SINGLE).write_bytes(struct.pack("<Q", len(text)) + text + raw[8 + length :])
    return folder


def stale_index(folder: Path) -> Path:
    """A folder where a merge wrote one file over a sharded checkpoint, and left the old index."""
    sharded(folder)
    for path in shards_of(folder):
        path.unlink()
    plain(folder)
    return folder


def own_index(folder: Path) -> Path:
    """An index that names model.safetensors itself, as some exporters write it."""
    names = load_file(plain(folder) / SINGLE)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": dict.fromkeys(names, SINGLE)}))
    return folder


def cast(folder: Path, dtype: torch.dtype, but: str = "") -> Path:
    return changed(folder, lambda ts: {n: t if but and but in n else t.to(dtype) for n, t in ts.items()})


def quantized(folder: Path, *parts: str) -> Path:
    """Linear layers in integers, with their scales and other tensors."""

    def change(tensors: Tensors) -> Tensors:
        found: Tensors = {}
        for name, value in tensors.items():
            if not name.endswith("_proj.weight"):
                found[name] = value.half()
                continue
            for part in parts:
                whole = torch.int32 if part.startswith("q") else torch.float8_e4m3fn
                found[f"{name.removesuffix('weight')}{part}"] = torch.ones(value.shape).to(
                    torch.float16 if "scale" in part else whole
                )
        return found

    return changed(folder, change)


def linked(folder: Path) -> Path:
    """A snapshot of the hub's cache: links to blobs."""
    blobs = plain(folder.parent / f"{folder.name}-blobs")
    folder.mkdir()
    for path in blobs.iterdir():
        (folder / path.name).symlink_to(path)
    return folder


def without(folder: Path, name: str) -> Path:
    (folder / name).unlink()
    return folder


def both(folder: Path, other: Path) -> Path:
    """The weights of another folder, added to those of this folder."""
    for path in other.glob("model*"):
        shutil.copy(path, folder)
    return folder


def as_pointer(folder: Path, *names: str) -> Path:
    for name in names:
        (folder / name).write_text(POINTER)
    return folder


def pickled(folder: Path) -> Path:
    torch.save(load_file(folder / SINGLE), folder / "pytorch_model.bin")
    return folder


def with_reference(
    folder: Path, change: Callable[[Path], Path], make: Callable[[Path], Path] = plain
) -> tuple[Path, Path]:
    """The changed folder, and one as it was before, which transformers can read."""
    make(folder)
    shutil.copytree(folder, reference := folder.parent / f"{folder.name}-reference")
    return change(folder), reference


ROTARY = "model__layers__0__self_attn__rotary_emb__inv_freq"
SERVED: dict[str, Callable[[Path], Path | tuple[Path, Path]]] = {
    "one file": plain,
    "shards with their index": sharded,
    "tied, no head stored": lambda f: plain(f, QWEN),
    "tied, the head stored, too": lambda f: changed(
        plain(f, QWEN), lambda t: {**t, "lm_head.weight": t["model.embed_tokens.weight"].clone()}
    ),
    "tied, the index names a head that no shard holds": lambda f: index_of(
        sharded(f, QWEN),
        lambda raw: raw["weight_map"].update({"lm_head.weight": max(raw["weight_map"].values())}),
    ),
    "the hub's cache": linked,
    "an old file of the same names beside it": lambda f: stray(plain(f), "model_before_training.safetensors"),
    "an old file whose name comes first": lambda f: stray(plain(f), "a_before_training.safetensors"),
    "an old file beside shards": lambda f: stray(sharded(f), "model-merged.safetensors"),
    "a fine-tune beside Mistral's old file": lambda f: stray(
        plain(f, MISTRAL), "consolidated.safetensors", params=True
    ),
    "shards beside Mistral's old shards": lambda f: with_files(
        stray(sharded(f, MISTRAL), "consolidated-00001-of-00001.safetensors"),
        consolidated__safetensors__index__json="{}",
    ),
    "an adapter's weights beside a merged model": lambda f: stray(plain(f), "adapter_model.safetensors"),
    "pickles beside it": lambda f: with_files(plain(f), pytorch_model__bin="x", consolidated__00__pth="x"),
    "GGUF and ONNX beside it": lambda f: with_files(plain(f), model__gguf="x", model__onnx="x"),
    "a trainer's state beside it": lambda f: with_files(
        plain(f), optimizer__pt="x", training_args__bin="x", trainer_state__json="{}"
    ),
    "pointers of files that are not read": lambda f: as_pointer(plain(f), "pytorch_model.bin", "photo.png"),
    "a broken stray": lambda f: with_files(plain(f), broken__safetensors="x"),
    "settings of ModelOpt beside 16 bits": lambda f: with_files(
        plain(f), hf_quant_config__json='{"quantization": {"quant_algo": "FP8"}}'
    ),
    "settings of AutoGPTQ beside 16 bits": lambda f: with_files(
        plain(f), quantize_config__json='{"bits": 4}'
    ),
    "a stale index beside one file": stale_index,
    "an index that names the one file": own_index,
    "an index that lacks a tensor of a shard": lambda f: index_of(
        sharded(f), lambda raw: raw["weight_map"].pop("model.norm.weight")
    ),
    "an index with total_size as a text": lambda f: index_of(
        sharded(f), lambda raw: raw.update(metadata={"total_size": "123456"})
    ),
    "an index without metadata": lambda f: with_reference(
        f, lambda g: index_of(g, lambda raw: raw.pop("metadata")), sharded
    ),
    "a file without metadata": lambda f: header_of(plain(f), lambda header: header.pop("__metadata__")),
    "stored rotary tables": lambda f: added(plain(f), **{ROTARY: (2,)}),
    "bfloat16": lambda f: configured(cast(plain(f), torch.bfloat16), dtype="bfloat16"),
    "bfloat16 with norms in float32": lambda f: configured(
        cast(plain(f), torch.bfloat16, but="norm"), dtype="bfloat16"
    ),
    "float16 under torch_dtype": lambda f: configured(
        cast(plain(f), torch.float16), "dtype", torch_dtype="float16"
    ),
    "no dtype": lambda f: configured(plain(f), "dtype"),
    "dtype null": lambda f: configured(plain(f), dtype=None),
    "dtype auto": lambda f: with_reference(f, lambda g: configured(g, dtype="auto")),
    "torch_dtype auto": lambda f: with_reference(f, lambda g: configured(g, "dtype", torch_dtype="auto")),
    "dtype torch.float32": lambda f: with_reference(f, lambda g: configured(g, dtype="torch.float32")),
    "quantization_config null": lambda f: configured(plain(f), quantization_config=None),
    "transformers_weights names the file": lambda f: configured(plain(f), transformers_weights=SINGLE),
    "experts, one by one": lambda f: plain(f, MOE),
}


CHUNKS = {"chunk_size": 262_144, "local_size": 8_192, "original_max_position_embeddings": 262_144}


def gptq(folder: Path) -> Path:
    return quantized(plain(folder), "qweight", "qzeros", "scales")


REFUSED: dict[str, tuple[Callable[[Path], Path], str]] = {
    "a git-lfs pointer for the weights": (
        lambda f: as_pointer(plain(f), SINGLE),
        r"model\.safetensors is not the real file.* a git-lfs pointer.*hf download REPO .*git lfs pull",
    ),
    "git-lfs pointers for shards": (
        lambda f: as_pointer(sharded(f), *(p.name for p in shards_of(f))),
        r"model-00001-of-.* a git-lfs pointer.*pull",
    ),
    "a git-lfs pointer for the index": (
        lambda f: as_pointer(sharded(f), INDEX),
        "index.json is .* a git-lfs pointer",
    ),
    "a git-lfs pointer for the tokenizer": (
        lambda f: as_pointer(plain(f), "tokenizer.json"),
        r"tokenizer\.json is .* a git-lfs pointer.*git lfs pull",
    ),
    "a git-lfs pointer for the config": (
        lambda f: as_pointer(plain(f), "config.json"),
        r"config\.json is .* a git-lfs pointer.*git lfs pull",
    ),
    "a git-lfs pointer for a chat template": (
        lambda f: as_pointer(plain(f), "chat_template.jinja"),
        r"chat_template\.jinja is .* a git-lfs pointer",
    ),
    "a web page for the weights": (
        lambda f: with_files(plain(f), model__safetensors="<!DOCTYPE html><html>"),
        "web page.*hf download REPO model.safetensors",
    ),
    "shards without an index": (
        lambda f: without(sharded(f), INDEX),
        "no index.*hf download REPO model.safetensors.index.json",
    ),
    "a shard is missing": (
        lambda f: without(sharded(f), "model-00002-of-00006.safetensors"),
        r"1 of the \d+ files.*model-00002.*download",
    ),
    "one file and the shards of an index": (
        lambda f: both(plain(f), sharded(f.parent / "sharded")),
        "weights twice.*keep model.safetensors, which transformers reads: `mv .*index.json.unused`.*only if",
    ),
    "a tensor in two shards": (
        lambda f: (
            sharded(f),
            save_file(
                load_file(shards_of(f)[-1]) | load_file(shards_of(f)[0]), shards_of(f)[-1], {"format": "pt"}
            ),
            f,
        )[-1],
        "both have .*files of two models are mixed.*save",
    ),
    "a pickle alone": (
        lambda f: without(pickled(plain(f)), SINGLE),
        "pytorch_model.bin, a pickle.*if you trust it.*save_pretrained.*register NAME .*model-saved",
    ),
    "GGUF alone": (
        lambda f: (plain(f) / SINGLE).rename(f / "q4.gguf").parent,
        "q4.gguf.*llama.cpp.*Base model.*hf download",
    ),
    "Mistral's own file alone": (
        lambda f: (plain(f) / SINGLE).rename(f / "consolidated.safetensors").parent,
        "Mistral's own.*hf download REPO",
    ),
    "a variant of precision alone": (
        lambda f: (plain(f) / SINGLE).rename(f / "model.fp16.safetensors").parent,
        "model.fp16.safetensors.*`mv .*model.fp16.safetensors .*/model.safetensors`",
    ),
    "another name alone": (
        lambda f: (plain(f) / SINGLE).rename(f / "weights.safetensors").parent,
        "`mv .*weights.safetensors .*/model.safetensors`.*checks that the file holds the whole.*hf download",
    ),
    "no weights": (lambda f: without(plain(f), SINGLE), "found no weights; copy .*hf download"),
    "the weights lie in a folder in it": (
        lambda f: (plain(f / "snapshots" / "abc"), f)[-1],
        "a model in .*snapshots/abc; register that folder: `ostinato register NAME .*snapshots/abc`",
    ),
    "weights in a folder beside the config": (
        lambda f: (
            plain(f / "inner"),
            (f / "config.json").write_text((f / "inner/config.json").read_text()),
            (f / "tokenizer.json").write_text("{}"),
            f,
        )[-1],
        r"a model in .*inner; register that folder: `ostinato register NAME .*inner`",
    ),
    "an adapter and a whole model": (
        lambda f: with_files(stray(plain(f), "adapter_model.safetensors"), adapter_config__json="{}"),
        "`mkdir .*mv .*if you do not know, register .*base_model_name_or_path.*register VARIANT --base NAME",
    ),
    "quantization_config left in": (
        lambda f: configured(plain(f), quantization_config={"quant_method": "bitsandbytes"}),
        "quantized by bitsandbytes, but they are unquantized.*delete quantization_config",
    ),
    "GPTQ": (
        lambda f: configured(gptq(f), quantization_config={"quant_method": "gptq"}),
        "quantized by gptq.*register the original model",
    ),
    "GPTQ by quantize_config.json": (
        lambda f: with_files(gptq(f), quantize_config__json="{}"),
        "see quantize_config.json.*qweight.*register the",
    ),
    "GPTQ that nothing tells of": (gptq, "qweight.*GPTQ or AWQ.*register the original model"),
    "ModelOpt by hf_quant_config.json": (
        lambda f: with_files(quantized(plain(f), "weight", "weight_scale"), hf_quant_config__json="{}"),
        "see hf_quant_config.json.*weight_scale.*register the original model",
    ),
    "compression_config": (
        lambda f: configured(
            quantized(plain(f), "weight", "weight_scale"),
            compression_config={"quant_method": "compressed-tensors"},
        ),
        "quantized by compressed-tensors .compression_config.*register the original model",
    ),
    "fp8 in blocks": (
        lambda f: configured(
            quantized(plain(f), "weight", "weight_scale_inv"), quantization_config={"quant_method": "fp8"}
        ),
        "quantized by fp8.*register the original model",
    ),
    "cast to fp8": (
        lambda f: cast(plain(f), torch.float8_e4m3fn, but="norm"),
        "F8_E4M3, but only .* are served.*bfloat16",
    ),
    "float64": (lambda f: cast(plain(f), torch.float64), "F64, but only .* are served.*bfloat16"),
    "scales of an fp8 KV cache": (
        lambda f: added(plain(f), model__layers__0__self_attn__k_proj__k_scale=(1,)),
        "k_scale.*write a copy without these tensors",
    ),
    "a value head": (
        lambda f: added(plain(f), v_head__summary__weight=(1, 16)),
        "value head of TRL.*write a copy without these tensors",
    ),
    "torch.compile's names": (
        lambda f: renamed(plain(f), "_orig_mod.{}".format),
        "_orig_mod.*torch.compile.*python -c.*model._orig_mod.save_pretrained",
    ),
    "DataParallel's names": (lambda f: renamed(plain(f), "module.{}".format), "DataParallel.*save"),
    "no model. in the names": (
        lambda f: renamed(plain(f), lambda n: n.removeprefix("model.")),
        "AutoModel saved.*head is not in these files.*AutoModelForCausalLM.*BASE is the model",
    ),
    "PEFT's names": (
        lambda f: renamed(plain(f), "base_model.model.{}".format),
        "wrapped by PEFT.*loses nothing.*python -c.*merge_and_unload",
    ),
    "a language model's names within another": (
        lambda f: renamed(plain(f), lambda n: n.replace("model.", "model.language_model.", 1)),
        "text and images, and these files have nothing else; rename",
    ),
    "a language model's names beside a part for images": (
        lambda f: added(
            renamed(plain(f), lambda n: n.replace("model.", "model.language_model.", 1)),
            model__vision_tower__weight=(2, 2),
        ),
        "text and images, which is not served; register a text-only model.*model.vision_tower.weight",
    ),
    "Meta's names": (
        lambda f: renamed(plain(f), lambda n: n.replace("model.embed_tokens", "tok_embeddings")),
        "own names.*download",
    ),
    "fused experts": (
        lambda f: plain(f, MOE, save_original_format=False),
        "all experts of a layer.*a tensor per expert",
    ),
    "a resized embedding": (
        lambda f: changed(
            plain(f), lambda ts: {n: torch.ones(44, 16) if t.shape == (40, 16) else t for n, t in ts.items()}
        ),
        '44 rows.*vocab_size 40.*write "vocab_size": 44.*more than 40 tokens: `python -c.*author',
    ),
    "an embedding resized without its head": (
        lambda f: changed(
            plain(f), lambda ts: {n: torch.ones(44, 16) if "embed_tokens" in n else t for n, t in ts.items()}
        ),
        r"has 44 rows, lm_head.weight has 40.*resize_token_embeddings\(44\).*if you downloaded it",
    ),
    "a tensor is missing": (
        lambda f: changed(plain(f), lambda ts: {n: t for n, t in ts.items() if n != "model.norm.weight"}),
        r"1 of the \d+ tensors.*model.norm.weight: .*; download.*hf download",
    ),
    "metadata that is no text": (
        lambda f: header_of(plain(f), lambda header: header["__metadata__"].update(step=1000)),
        "__metadata__ to be a text.*python -c.*save_file",
    ),
    "a sentence-transformers folder": (
        lambda f: with_files(
            plain(f, QWEN), modules__json='[{"type": "sentence_transformers.models.Pooling"}]'
        ),
        r"modules\.json this is .*sentence-transformers.*choose such a model.*modules.json.unused",
    ),
    "Qwen2.5-1M": (
        lambda f: configured(plain(f, QWEN), dual_chunk_attention_config=CHUNKS),
        'delete dual_chunk_attention_config, write "max_position_embeddings": 262144',
    ),
    "transformers_weights names another file": (
        lambda f: configured(plain(f), transformers_weights="old.safetensors"),
        "names old.safetensors.*delete transformers_weights.*Ostinato then serves model.safetensors",
    ),
    "transformers_weights names another file of the folder": (
        lambda f: configured(stray(plain(f), "old.safetensors"), transformers_weights="old.safetensors"),
        "delete transformers_weights.*`mv .*unused` and `mv .*old.safetensors .*/model.safetensors`",
    ),
    "no architectures": (
        lambda f: configured(plain(f), "architectures"),
        '"architectures" is missing; add.*LlamaForCausalLM',
    ),
    "a classifier": (
        lambda f: configured(plain(f), architectures=["LlamaForSequenceClassification"]),
        "classifies.*choose a model whose config.json names one of",
    ),
    "a model for images and text": (
        lambda f: configured(plain(f), architectures=["Gemma3ForConditionalGeneration"]),
        "images.*text-only model, such as.*choose",
    ),
    "an unknown architecture": (
        lambda f: configured(plain(f), architectures=["Olmo2ForCausalLM"]),
        "Olmo2ForCausalLM is not served",
    ),
    "dtype float8": (
        lambda f: configured(plain(f), dtype="float8_e4m3fn"),
        'got float8_e4m3fn.*write "dtype": "auto"',
    ),
    "a byte-order mark": (
        lambda f: with_files(plain(f), config__json="\ufeff" + (f / "config.json").read_text()),
        "byte-order mark.*`sed",
    ),
    "a key twice": (
        lambda f: with_files(plain(f), config__json='{"a": 1, "a": 2}'),
        "the key 'a' occurs twice; correct it",
    ),
    "a trailing comma": (
        lambda f: with_files(plain(f), config__json='{"a": 1, }'),
        "not valid JSON: .*correct it",
    ),
    "no tokenizer": (
        lambda f: without(plain(f), "tokenizer.json"),
        "expected a tokenizer.*hf download.*AutoTokenizer",
    ),
}


def assert_says_what_to_do(message: str, folder: Path) -> None:
    """The defect, its file, and a step, as the command line splits it into an error and a hint."""
    wrong, _, step = message.partition("; ")
    assert str(folder) in wrong
    assert step
    assert "<" not in message
    assert "\n" not in message
