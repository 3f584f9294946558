"""Random variants of every kind for any small base folder, and a tiny base to make them for.

Their strength is relative to the weights they change: enough to change the text, little enough that it
stays text.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from profiler.variants.modules import EMBEDDING, HEAD
from profiler.variants.types import SVD_GROUP, VariantKind
from testkit import random_adapters
from testkit.random_adapters import ATTENTION, MLP, RandomLora
from testkit.tiny_tokenizers import ONE_WORD
from workers.compression.job import Job, compress
from workers.compression.methods.magnitude import magnitude
from workers.compression.types import Compressed, Encoded, Method, Problem
from workers.deltas import svd
from workers.deltas.parts import svd_parts

TINY: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 48,
    "vocab_size": 64,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
}
QWEN2 = {**TINY, "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}


@dataclass(frozen=True)
class RandomBoft:
    """`factors` butterfly factors of blocks of `block_size`; |Rot - I| is about `strength` per input."""

    name: str
    seed: int
    factors: int = 1
    block_size: int = 8
    modules: tuple[str, ...] = ATTENTION + MLP
    strength: float = 0.12


@dataclass(frozen=True)
class RandomDelta:
    """A compressed delta of a random fine-tune; with `full` its norms and embedding differ as well, the
    latter by `tables` of itself: it is stored as a difference if that is little, and else whole. Biases of
    `kept` stay the base's."""

    name: str
    seed: int
    method: str = "sparse"
    bits: int = 4
    group_size: int | None = None
    full: bool = True
    strength: float = 0.12
    tables: float = 0.05
    kept: tuple[str, ...] = ()


RandomVariant = RandomLora | RandomBoft | RandomDelta

EVERY_KIND: tuple[RandomVariant, ...] = (
    RandomLora("lora-r8", 8, 1),
    RandomLora("lora-r3-attention", 3, 2, ATTENTION),
    RandomLora("rslora-r16", 16, 3, rank_stabilised=True),
    RandomDelta("sparse-4bit", 4, "sparse", 4),
    RandomDelta("sparse-2bit", 5, "sparse", 2, full=False, strength=0.08),
    RandomDelta("svd", 6, "svd"),
    RandomBoft("boft-m1", 7, 1, 16),
    RandomBoft("boft-m2", 8, 2, 8),
)
# Also 16-bit and 4-bit numbers in a low-rank delta, which packing and kernels handle separately.
EVERY_FORM = (*EVERY_KIND, RandomDelta("svd-16bit", 9, "wide svd", full=False))
WIDE = ((16, 12), (4, 40))  # bits, ranks


def write(base: Path, folder: Path, variant: RandomVariant) -> Path:
    """Write the variant of `base` as the new folder `folder`."""
    match variant:
        case RandomLora():
            return random_adapters.write(base, folder, variant)
        case RandomBoft():
            return write_boft(base, folder, variant)
        case RandomDelta():
            return write_delta(base, folder, variant)


def write_boft(base: Path, folder: Path, boft: RandomBoft, **config: Any) -> Path:
    """As PEFT's `save_pretrained` would; `config` overrides entries of adapter_config.json."""
    generator = torch.Generator().manual_seed(boft.seed)
    tensors: dict[str, torch.Tensor] = {}
    spread = boft.strength / (2 * boft.block_size * boft.factors) ** 0.5
    for name, weight in weights(base):
        if name.endswith("_proj.weight") and name.split(".")[-2] in boft.modules:
            out, into = weight.shape
            shape = (boft.factors, into // boft.block_size, boft.block_size, boft.block_size)
            at = f"base_model.model.{name.removesuffix('.weight')}"
            tensors[f"{at}.boft_R"] = spread * torch.randn(shape, generator=generator)
            tensors[f"{at}.boft_s"] = 1 + 0.02 * torch.randn(out, 1, generator=generator)
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    settings = {
        "peft_type": "BOFT",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(base),
        "boft_block_size": boft.block_size,
        "boft_block_num": 0,
        "boft_n_butterfly_factor": boft.factors,
        "bias": "none",
        "target_modules": list(boft.modules),
    }
    (folder / "adapter_config.json").write_text(json.dumps({**settings, **config}))
    return folder


def write_delta(base: Path, folder: Path, delta: RandomDelta) -> Path:
    """Fine-tune `base` at random and compress the difference."""
    if delta.method == "sparse":
        method = magnitude(delta.bits, delta.group_size)
    else:
        method = rounded_svd(groups=WIDE if delta.method == "wide svd" else ())
    with tempfile.TemporaryDirectory() as scratch:
        tuned = Path(scratch) / "tuned"
        write_tuned(
            base, tuned, delta.seed, delta.strength, full=delta.full, tables=delta.tables, kept=delta.kept
        )
        compress(Job(base, tuned, folder, method, force=True))
    return folder


def rounded_svd(budget: float = 1 / 16, groups: Sequence[tuple[int, int]] = ()) -> Method:
    """Truncated SVD in 8, 3 and 2 bits, or (bits, ranks) of one's own, rounded to nearest: a low-rank delta
    without calibration."""

    def step(problem: Problem) -> Compressed:
        out, into = problem.base.shape
        kept = groups or svd.default_groups((out, into), budget)
        coded = svd.encode(problem.delta, kept)
        encoded = Encoded(*svd_parts(coded))
        return Compressed(problem.base + svd.decode(coded, (out, into)), encoded.size_bytes, encoded)

    return Method("svd, rounded", VariantKind.SVD_DELTA, False, step, {"group_size": SVD_GROUP})


def write_tuned(
    base: Path,
    folder: Path,
    seed: int,
    strength: float = 0.12,
    *,
    full: bool = True,
    tables: float = 0.05,
    kept: Sequence[str] = (),
) -> Path:
    """A checkpoint whose linear weights are the base's plus a rank-4 and a dense random part.

    With `full` the norms and biases change a little too, but for biases of the modules `kept`, and embedding
    and head by `tables` of themselves.
    """
    generator = torch.Generator().manual_seed(seed)

    def tune(name: str, weight: torch.Tensor) -> torch.Tensor:
        if name.endswith("_proj.weight"):
            return weight + _like_training(weight, strength, generator)
        if name.endswith(".bias") and name.split(".")[-2] in kept:
            return weight
        much = tables if name in (EMBEDDING, HEAD) else 0.05
        return weight * (1 + much * torch.randn(weight.shape, generator=generator)) if full else weight

    return copy_model(base, folder, tune)


def _like_training(weight: torch.Tensor, strength: float, generator: torch.Generator) -> torch.Tensor:
    out, into = weight.shape
    low = torch.randn(out, 4, generator=generator) @ torch.randn(4, into, generator=generator)
    noise = torch.randn(out, into, generator=generator)
    step = low / low.norm() + 0.3 * noise / noise.norm()
    changed: torch.Tensor = step * (strength * weight.norm() / step.norm())
    return changed


def copy_model(
    base: Path, folder: Path, change: Callable[[str, torch.Tensor], torch.Tensor], **config: Any
) -> Path:
    """The base in one file, each weight (as float32) passed through `change`, in the type it had."""
    folder.mkdir(parents=True)
    for path in base.iterdir():
        if path.suffix != ".safetensors" and not path.name.endswith(".index.json"):
            (folder / path.name).write_bytes(path.read_bytes())
    settings = json.loads((base / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**settings, **config}))
    changed = {n: change(n, w.float()).to(w.dtype).contiguous() for n, w in weights(base)}
    save_file(changed, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def first_layers(base: Path, folder: Path, layers: int) -> Path:
    """The same model in float32, without the layers after the first `layers`."""
    settings = json.loads((base / "config.json").read_text())
    dtype = {name: "float32" for name in ("dtype", "torch_dtype") if name in settings}
    written = copy_model(base, folder, lambda name, weight: weight, num_hidden_layers=layers, **dtype)
    kept = {name: weight.float() for name, weight in weights(base) if _layer(name) < layers}
    save_file(kept, written / "model.safetensors", metadata={"format": "pt"})
    return written


def _layer(name: str) -> int:
    """The layer of a tensor; 0 for tensors outside of layers."""
    return int(name.split(".")[2]) if name.startswith("model.layers.") else 0


def weights(base: Path) -> Iterator[tuple[str, torch.Tensor]]:
    for path in sorted(base.glob("*.safetensors")):
        yield from weights_in(path)


def weights_in(path: Path) -> Iterator[tuple[str, torch.Tensor]]:
    yield from load_file(path).items()


def write_tiny_base(folder: Path, seed: int = 0, *, shards: int = 1, **config: Any) -> Path:
    """A two-layer model with random weights; Qwen2's with biases, in several shards if asked for."""
    settings = {**TINY, **config}
    tensors = _tiny_weights(settings, torch.Generator().manual_seed(seed))
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(settings))
    (folder / "tokenizer.json").write_text(ONE_WORD)
    if shards == 1:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return folder
    names, weight_map = sorted(tensors), {}
    for number in range(shards):
        file = f"model-{number + 1:05d}-of-{shards:05d}.safetensors"
        held = names[number::shards]
        save_file({name: tensors[name] for name in held}, folder / file, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(held, file))
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def _tiny_weights(config: dict[str, Any], generator: torch.Generator) -> dict[str, torch.Tensor]:
    h, i, v, d = (config[key] for key in ("hidden_size", "intermediate_size", "vocab_size", "head_dim"))
    q, kv = config["num_attention_heads"] * d, config["num_key_value_heads"] * d
    dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16}[config["torch_dtype"]]
    linear = {
        **{"self_attn.q_proj": (q, h), "self_attn.k_proj": (kv, h), "self_attn.v_proj": (kv, h)},
        **{"self_attn.o_proj": (h, q), "mlp.gate_proj": (i, h), "mlp.up_proj": (i, h)},
        **{"mlp.down_proj": (h, i)},
    }
    made = {
        "model.embed_tokens.weight": torch.randn(v, h, generator=generator),
        "model.norm.weight": torch.ones(h),
    }
    if not config["tie_word_embeddings"]:
        made["lm_head.weight"] = torch.randn(v, h, generator=generator)
    for n in range(config["num_hidden_layers"]):
        at = f"model.layers.{n}."
        for name, (out, into) in linear.items():
            made[f"{at}{name}.weight"] = torch.randn(out, into, generator=generator) / into**0.5
            if config["model_type"] == "qwen2" and name[-6] in "qkv":
                made[f"{at}{name}.bias"] = torch.randn(out, generator=generator)
        made[f"{at}input_layernorm.weight"] = 1 + 0.1 * torch.randn(h, generator=generator)
        made[f"{at}post_attention_layernorm.weight"] = 1 + 0.1 * torch.randn(h, generator=generator)
    return {name: tensor.to(dtype) for name, tensor in made.items()}
