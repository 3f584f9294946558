"""Small adapters' folders as trainers write them, on a tiny Llama: hidden 128, 2 layers, heads of 64.

The form of `base_layouts`: `SERVED` maps names to builders; `REFUSED` adds the text that the message must
contain.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

Tensors = dict[str, torch.Tensor]
SIZES: dict[str, Any] = {
    "num_hidden_layers": 2,
    "hidden_size": 128,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 128,
    "vocab_size": 96,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}
SHAPES = {
    "q_proj": (128, 128),
    "k_proj": (64, 128),
    "v_proj": (64, 128),
    "o_proj": (128, 128),
    "gate_proj": (128, 128),
    "up_proj": (128, 128),
    "down_proj": (128, 128),
}
CONFIG = {
    "peft_type": "LORA",
    "task_type": "CAUSAL_LM",
    "base_model_name_or_path": "some/base",
    "r": 4,
    "lora_alpha": 8,
    "lora_dropout": 0.0,
    "bias": "none",
    "target_modules": ["q_proj", "v_proj"],
    "inference_mode": True,
}
PREFIX = "base_model.model.model."
AXOLOTL = r".*\.layers\.1\..*(q_proj|k_proj|v_proj|o_proj)$"
UNSLOTH = (
    r"(?:.*?(?:language|text).*?(?:self_attn|attention|attn|mlp|feed_forward|ffn|dense).*?(?:q_proj|v_proj).*?)"
    r"|(?:\bmodel\.layers\.[\d]{1,}\.(?:self_attn|mlp)\.(?:(?:q_proj|v_proj)))"
)
POINTER = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'4d' * 32}\nsize 497\n"


def weights(
    modules: Iterable[str] = ("q_proj", "v_proj"),
    rank: int = 4,
    prefix: str = PREFIX,
    suffix: str = ".weight",
    layers: Iterable[int] = (0, 1),
) -> Tensors:
    generator = torch.Generator().manual_seed(7)
    found: Tensors = {}
    for layer in layers:
        for module in modules:
            out, into = SHAPES[module]
            block = "self_attn" if module in ("q_proj", "k_proj", "v_proj", "o_proj") else "mlp"
            at = f"{prefix}layers.{layer}.{block}.{module}"
            found[f"{at}.lora_A{suffix}"] = torch.randn(rank, into, generator=generator) * 0.05
            found[f"{at}.lora_B{suffix}"] = torch.randn(out, rank, generator=generator) * 0.2
    return found


def write(
    folder: Path,
    config: Mapping[str, Any] | None = None,
    tensors: Tensors | None = None,
    without: Iterable[str] = (),
    **more: Any,
) -> Path:
    """A folder as save_pretrained writes it; `more` are further keys of the config."""
    folder.mkdir(parents=True)
    raw = {**CONFIG, **(config or {}), **more}
    (folder / "adapter_config.json").write_text(
        json.dumps({key: value for key, value in raw.items() if key not in tuple(without)})
    )
    held = weights() if tensors is None else tensors
    save_file(held, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    return folder


def with_files(folder: Path, **files: str) -> Path:
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)
    return folder


def without(folder: Path, name: str) -> Path:
    (folder / name).unlink()
    return folder


ALL = tuple(SHAPES)
LATER: dict[str, Any] = {
    "eva_config": None,
    "corda_config": None,
    "loftq_config": {},
    "qalora_group_size": 16,
    "use_qalora": False,
}
MIXED = {**weights(layers=(0,)), **weights(rank=8, layers=(1,))}
SERVED: dict[str, Callable[[Path], Path]] = {
    "as PEFT writes it": write,
    "all linear layers by a word": lambda f: write(f, tensors=weights(ALL), target_modules="all-linear"),
    "rank-stabilised": lambda f: write(f, use_rslora=True),
    "targets that the base lacks": lambda f: write(f, target_modules=["q_proj", "v_proj", "W_pack", "fc1"]),
    "excluded targets": lambda f: write(
        f, target_modules=["q_proj", "v_proj", "o_proj"], exclude_modules=["o_proj"]
    ),
    "excluded by an expression": lambda f: write(
        f, target_modules=["q_proj", "v_proj", "o_proj"], exclude_modules=r".*\.o_proj"
    ),
    "full names as targets": lambda f: write(
        f, target_modules=[f"model.layers.{n}.self_attn.{m}" for n in (0, 1) for m in ("q_proj", "v_proj")]
    ),
    "PEFT's prefix in a target": lambda f: write(
        f, target_modules=["base_model.model.model.layers.0.self_attn.q_proj", "q_proj", "v_proj"]
    ),
    "Unsloth's expression": lambda f: write(f, target_modules=UNSLOTH),
    "one layer": lambda f: write(f, tensors=weights(layers=(1,)), layers_to_transform=[1]),
    "one layer by its number": lambda f: write(f, tensors=weights(layers=(1,)), layers_to_transform=1),
    "axolotl's patterns": lambda f: write(
        f, tensors=MIXED, rank_pattern={AXOLOTL: 8}, alpha_pattern={AXOLOTL: 32}
    ),
    "a pattern from the beginning": lambda f: write(
        f, tensors=MIXED, rank_pattern={r"^model.layers.1.self_attn.(q|v)_proj": 8}
    ),
    "plain patterns": lambda f: write(
        f,
        tensors=MIXED,
        rank_pattern={"layers.1.self_attn.q_proj": 8, "layers.1.self_attn.v_proj": 8},
        alpha_pattern={"v_proj": 3},
    ),
    "the first pattern wins": lambda f: write(
        f, alpha_pattern={r".*self_attn\..*": 2, "q_proj": 64, r"layers\.0\..*": 32}
    ),
    "a pattern that means nothing here": lambda f: write(f, alpha_pattern={".*mlp.*": 4}),
    "an alpha that is no whole number": lambda f: write(f, lora_alpha=2.5),
    "no alpha": lambda f: write(f, without=["lora_alpha"]),
    "no rank": lambda f: write(f, tensors=weights(rank=8), without=["r"]),
    "no targets": lambda f: write(f, without=["target_modules"]),
    "targets null": lambda f: write(f, target_modules=None),
    "keys of later versions": lambda f: write(f, LATER, peft_version="0.99", some_future_key={"x": 1}),
    "modules_to_save empty": lambda f: write(f, modules_to_save=[]),
    "gaussian initialisation": lambda f: write(f, init_lora_weights="gaussian"),
    "bfloat16": lambda f: write(f, tensors={n: t.bfloat16() for n, t in weights().items()}),
    "a pickle beside it": lambda f: with_files(write(f), adapter_model__bin="x"),
    "a trainer's state beside it": lambda f: with_files(
        write(f), optimizer__pt="x", README__md="x", trainer_state__json="{}"
    ),
    "a model's config beside it": lambda f: with_files(write(f), config__json="{}"),
    "pointers of files that are not read": lambda f: with_files(write(f), optimizer__pt=POINTER),
}

A, B = (f"{PREFIX}layers.0.self_attn.q_proj.lora_{side}.weight" for side in "AB")


def also(**more: tuple[int, ...]) -> Tensors:
    """LoRA's matrices and tensors below base_model.model.; `__` in a name stands for a dot."""
    return {
        **weights(),
        **{f"base_model.model.{name.replace('__', '.')}": torch.ones(shape) for name, shape in more.items()},
    }


HEAD_LORA = also(lm_head__lora_A__weight=(4, 128), lm_head__lora_B__weight=(96, 4))
MERGED = "merge the adapter into its base"
REFUSED: dict[str, tuple[Callable[[Path], Path], str]] = {
    "a resized vocabulary": (
        lambda f: write(f, tensors=also(model__embed_tokens__weight=(100, 128), lm_head__weight=(100, 128))),
        f"lm_head.weight is the base's head with 100 rows, but this base has 96: tokens were.*{MERGED}",
    ),
    "the embedding saved as a whole": (
        lambda f: write(f, tensors=also(model__embed_tokens__weight=(96, 128))),
        f"embed_tokens.weight is the base's embedding as a whole.*{MERGED}.*whether or not.*save_embedding",
    ),
    "the head of the base beside its adapter": (
        lambda f: write(f, tensors={**HEAD_LORA, **also(lm_head__base_layer__weight=(96, 128))}),
        f"lm_head.base_layer.weight is the base's head, which PEFT stores together with.*{MERGED}",
    ),
    "an adapter of the head": (
        lambda f: write(f, tensors=HEAD_LORA, target_modules=["q_proj", "v_proj", "lm_head"]),
        f"lm_head.lora_A.weight is an adapter of the head, which is not served; {MERGED}",
    ),
    "an adapter of the embedding": (
        lambda f: write(f, tensors=also(model__embed_tokens__lora_embedding_A=(4, 96))),
        f"lora_embedding_A is an adapter of the embedding.*{MERGED}",
    ),
    "norms as mergekit extracts them": (
        lambda f: write(f, tensors=also(model__norm__weight=(128,))),
        f"norm.weight is a norm as a whole.*{MERGED}",
    ),
    "a trained bias": (lambda f: write(f, bias="all"), f"bias.*{MERGED}"),
    "a stored bias": (
        lambda f: write(f, tensors=also(model__layers__0__self_attn__q_proj__bias=(128,))),
        "trained bias, but this base has no bias there; .*trained on .adapter_config.json names some/base",
    ),
    "DoRA by its config": (lambda f: write(f, use_dora=True), f"use_dora is set: DoRA.*{MERGED}"),
    "DoRA by its tensors": (
        lambda f: write(f, tensors=also(model__layers__0__self_attn__q_proj__lora_magnitude_vector=(128,))),
        f"lora_magnitude_vector belongs to DoRA.*{MERGED}",
    ),
    "KaSA by its config": (
        lambda f: write(f, kasa_config={"beta": 1}),
        f"kasa_config is set: KaSA.*{MERGED}",
    ),
    "KaSA by its tensors": (
        lambda f: write(f, tensors=also(model__layers__0__self_attn__q_proj__lora_diag=(4,))),
        f"lora_diag belongs to KaSA.*output folder of the training.*author.*{MERGED}",
    ),
    "VeLoRA": (lambda f: write(f, velora_config={"scale": 1}), f"velora_config is set: VeLoRA.*{MERGED}"),
    "VeLoRA by its tensors": (
        lambda f: write(f, tensors=also(model__layers__0__self_attn__q_proj__lora_velora_embed=(4,))),
        f"lora_velora_embed belongs to VeLoRA.*{MERGED}",
    ),
    "activated LoRA": (
        lambda f: write(f, alora_invocation_tokens=[1, 2]),
        r"activated LoRA is not served; train an adapter without it, or choose another",
    ),
    "trained tokens": (
        lambda f: write(f, trainable_token_indices=[3]),
        f"trainable_token_indices is set: trained rows.*{MERGED}.*if tokens were added.*tokenizer.json",
    ),
    "fully trained modules": (lambda f: write(f, modules_to_save=["lm_head"]), f"modules_to_save.*{MERGED}"),
    "a classifier": (
        lambda f: write(f, task_type="SEQ_CLS", modules_to_save=["score"]),
        "SEQ_CLS.*classifies, which.*choose another",
    ),
    "PiSSA": (
        lambda f: write(f, init_lora_weights="pissa"),
        f"is 'pissa'.*when it loads the adapter to merge it; {MERGED}",
    ),
    "PiSSA by a random method": (
        lambda f: write(f, init_lora_weights="pissa_niter_4"),
        "pissa_niter_4.*does not repeat.*the merged model.*path_initial_model_for_weight_conversion",
    ),
    "an unknown initialisation": (
        lambda f: write(f, init_lora_weights="true"),
        "is the text 'true'; write true without quotes",
    ),
    "AdaLoRA": (lambda f: write(f, peft_type="ADALORA"), f"got ADALORA, which is not served; {MERGED}"),
    "MLX": (
        lambda f: with_files(
            write(f),
            adapter_config__json='{"model": "some/base", "lora_parameters": {"rank": 8}}',
        ),
        "adapter of MLX.*pip install mlx-lm.*mlx_lm fuse --model BASE --adapter-path.*some/base",
    ),
    "empty tensors of DeepSpeed": (
        lambda f: write(f, tensors={name: torch.zeros(0) for name in weights()}),
        "empty.*ZeRO-3.*save the adapter again.*ask its author",
    ),
    "no tensors": (lambda f: write(f, tensors={}), "has no tensors.*save the adapter again"),
    "a state_dict's names": (
        lambda f: write(f, tensors=weights(suffix=".default.weight")),
        r"\(default\).*`python -c",
    ),
    "torch.compile's names": (
        lambda f: write(f, tensors=weights(prefix="base_model.model._orig_mod.model.")),
        "_orig_mod.*remove _orig_mod.*`python -c",
    ),
    "names of a model for images": (
        lambda f: write(f, tensors=weights(prefix="base_model.model.model.language_model.")),
        "text and images; if .*names some/base.*remove language_model. from.*`python -c.*do not know, choose",
    ),
    "no prefix of PEFT": (
        lambda f: write(f, tensors=weights(prefix="model.")),
        "lacks PEFT's prefix; put base_model.model. before every name: `python -c",
    ),
    "AutoModel's names": (
        lambda f: write(f, tensors=weights(prefix="base_model.model.")),
        "lacks model. in its name.*put model. into the names: `python -c",
    ),
    "fused projections": (
        lambda f: write(f, tensors=also(model__layers__0__self_attn__qkv_proj__lora_A__weight=(4, 128))),
        "has no module self_attn.qkv_proj.*base that it was trained on",
    ),
    "experts": (
        lambda f: write(f, tensors=also(model__layers__0__mlp__experts__0__up_proj__lora_A__weight=(4, 128))),
        f"adapts experts.*{MERGED}",
    ),
    "a layer that the base lacks": (
        lambda f: write(f, tensors=weights(layers=(0, 1, 2))),
        "layer 2, but the base has 2.*base that it was trained",
    ),
    "another rank than the config says": (
        lambda f: write(f, r=8),
        r'shape \(4, 128\), but rank 8.*write "r": 4',
    ),
    "tensors that the targets leave out": (
        lambda f: write(f, target_modules=["q_proj"]),
        'v_proj has weights.*target_modules does not name it; add "v_proj" to target_modules',
    ),
    "tensors that are excluded": (
        lambda f: write(f, exclude_modules=["v_proj"]),
        'v_proj has weights.*exclude_modules names it; remove "v_proj"',
    ),
    "tensors of layers that are left out": (
        lambda f: write(f, layers_to_transform=[0]),
        "layers.1.*layers_to_transform leaves its layer out; add 1 to",
    ),
    "a pattern that looks ahead": (
        lambda f: write(f, rank_pattern={"(?!q).*": 8}),
        'rank_pattern.*looking ahead.*not supported; .*write "r": 4 and no rank_pattern',
    ),
    "a pattern of alphas that looks ahead": (
        lambda f: write(f, alpha_pattern={"(?!q).*": 8}),
        'not supported; .*this adapter has q_proj, v_proj.*such as "q_proj": 8',
    ),
    "ranks that differ": (
        lambda f: write(f, tensors=MIXED),
        r'in that config write "r": 4 and "rank_pattern": {"layers.1.self_attn.q_proj": 8, "layers.1.self',
    ),
    "a checkpoint in a trainer's folder": (
        lambda f: write(f / "checkpoint-500").parent,
        "found it in its folder checkpoint-500.*`ostinato register NAME --base BASE --adapter .*-500`",
    ),
    "a pickle": (
        lambda f: (write(f) / "adapter_model.safetensors").rename(f / "adapter_model.bin").parent,
        "adapter_model.bin, a pickle.*`python -c .*weights_only=True",
    ),
    "a git-lfs pointer": (
        lambda f: with_files(write(f), adapter_model__safetensors=POINTER),
        "a git-lfs pointer.*REPO is the name of the adapter's own repository.*git lfs pull",
    ),
    "a git-lfs pointer for the config": (
        lambda f: with_files(write(f), adapter_config__json=POINTER),
        "adapter_config.json is .* a git-lfs pointer.*pull",
    ),
    "a whole model": (
        lambda f: without(with_files(write(f), config__json="{}"), "adapter_config.json"),
        "this is a whole model; register it as.*register NAME .*adapter`.*--base BASE`",
    ),
    "the weights alone": (
        lambda f: without(write(f), "adapter_config.json"),
        "found only .*; copy adapter_config.json there.*the adapter's own repository",
    ),
}
