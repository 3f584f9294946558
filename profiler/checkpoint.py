"""From a Hugging Face checkpoint folder to a `ModelSpec`, without loading a single weight.

`config.json` says what the tensors should be; the safetensors headers say what they are; the two must
agree exactly. That every hidden layer is alike is what MaverIQ's fingerprints rest on (section 5.1), so
it is checked here, not assumed.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from profiler.errors import CheckpointError
from profiler.files import FLOAT_DTYPES, is_file, read_json, shown
from profiler.fingerprint import fingerprint
from profiler.types import ModelSpec, TensorRef
from profiler.weight_files import locate, none_missing

Shapes = dict[str, tuple[int, ...]]

CONFIG_DTYPES = {"float32": 4, "float16": 2, "half": 2, "bfloat16": 2, "float": 4}
STORED_DTYPES = {"F32": 4, "F16": 2, "BF16": 2}
TOKENIZERS = (("tokenizer.json",), ("tokenizer.model",), ("vocab.json", "merges.txt"))


@dataclass(frozen=True)
class Family:
    """How one architecture differs from Llama. The keys name booleans in config.json, false if absent."""

    qkv_bias_key: str | None = None
    o_bias_key: str | None = None
    mlp_bias_key: str | None = None
    always_qkv_bias: bool = False
    qk_norm: bool = False
    default_head_dim: int | None = None


FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": Family("attention_bias", "attention_bias", "mlp_bias"),
    "MistralForCausalLM": Family(),
    "Qwen2ForCausalLM": Family(always_qkv_bias=True),
    "Qwen3ForCausalLM": Family("attention_bias", "attention_bias", qk_norm=True, default_head_dim=128),
}

# What config.json says that does not change what the stored weights are: no part of a fingerprint.
NO_PART_OF_WEIGHTS = frozenset({"dtype_bytes", "max_position"})

# The largest values taken for sane: beyond them a config is a mistake or an attack.
LIMITS = {
    "num_hidden_layers": 1_024,
    "hidden_size": 131_072,
    "num_attention_heads": 1_024,
    "num_key_value_heads": 1_024,
    "head_dim": 1_024,
    "intermediate_size": 1_048_576,
    "vocab_size": 2_000_000,
    "max_position_embeddings": 100_000_000,
}


@dataclass(frozen=True)
class Config:
    """The checked numbers of config.json."""

    architecture: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    max_position: int
    tied: bool
    dtype_bytes: int | None
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool

    def linear_shapes(self) -> dict[str, tuple[int, int]]:
        """(out, in) features of each adaptable module, by its short name."""
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        h, i = self.hidden, self.intermediate
        attention = {"q_proj": (q, h), "k_proj": (kv, h), "v_proj": (kv, h), "o_proj": (h, q)}
        return {**attention, "gate_proj": (i, h), "up_proj": (i, h), "down_proj": (h, i)}

    def layer_shapes(self) -> Shapes:
        """Every tensor of one hidden layer, named below `model.layers.N.`."""
        shapes: Shapes = {}
        for module, (out, into) in self.linear_shapes().items():
            name = f"{block_of(module)}.{module}"
            shapes[f"{name}.weight"] = (out, into)
            if self._has_bias(module):
                shapes[f"{name}.bias"] = (out,)
        if self.qk_norm:
            shapes.update({f"self_attn.{n}_norm.weight": (self.head_dim,) for n in "qk"})
        norms = ("input_layernorm", "post_attention_layernorm")
        return {**shapes, **{f"{norm}.weight": (self.hidden,) for norm in norms}}

    def _has_bias(self, module: str) -> bool:
        if module in ("q_proj", "k_proj", "v_proj"):
            return self.qkv_bias
        return self.o_bias if module == "o_proj" else self.mlp_bias

    def other_shapes(self) -> Shapes:
        """Every tensor outside the hidden layers, by its full name."""
        table = (self.vocab, self.hidden)
        shapes: Shapes = {"model.embed_tokens.weight": table, "model.norm.weight": (self.hidden,)}
        return shapes if self.tied else {**shapes, "lm_head.weight": table}


def block_of(module: str) -> str:
    """The block that holds a module: q_proj lies in self_attn, up_proj in mlp."""
    return "self_attn" if module in ("q_proj", "k_proj", "v_proj", "o_proj") else "mlp"


def read_model(folder: Path) -> ModelSpec:
    """Read and check the checkpoint in `folder`; raises CheckpointError.

    Bytes are counted in the data type that config.json names (the one the engine serves in), or else in
    the one most tensors are stored in.
    """
    config = parse_config(read_json(folder / "config.json"), folder)
    _check_tokenizer(folder)
    tensors = locate(folder)
    expected = _expected(config)
    _check_tensors(config, expected, tensors, folder)
    facts = {key: value for key, value in asdict(config).items() if key not in NO_PART_OF_WEIGHTS}
    dtype_bytes = config.dtype_bytes or _stored_bytes(tensors)
    return ModelSpec(
        architecture=config.architecture,
        num_layers=config.layers,
        hidden_size=config.hidden,
        num_heads=config.heads,
        num_kv_heads=config.kv_heads,
        head_dim=config.head_dim,
        vocab_size=config.vocab,
        max_position=config.max_position,
        dtype_bytes=dtype_bytes,
        layer_weight_bytes=_elements(config.layer_shapes()) * dtype_bytes,
        other_weight_bytes=_elements(config.other_shapes()) * dtype_bytes,
        linear_shapes=config.linear_shapes(),
        layer_shapes=config.layer_shapes(),
        other_shapes=config.other_shapes(),
        tied=config.tied,
        fingerprint=fingerprint(folder, facts, {name: tensors[name] for name in expected}),
    )


def parse_config(raw: dict[str, Any], folder: Path) -> Config:
    """Check a parsed config.json; raises CheckpointError naming the offending key."""
    where = folder / "config.json"
    architecture = _architecture(raw, where)
    if raw.get("quantization_config"):
        raise CheckpointError(f"{where} describes a quantized checkpoint; register the unquantized one")
    family = FAMILIES[architecture]
    heads = _positive(raw, "num_attention_heads", where)
    kv_heads = _positive(raw, "num_key_value_heads", where, default=heads)
    if heads % kv_heads:
        raise CheckpointError(f"{where}: {heads} attention heads do not divide by {kv_heads} key/value heads")
    hidden = _positive(raw, "hidden_size", where)
    qkv_bias = family.always_qkv_bias or _flag(raw, family.qkv_bias_key, where)
    return Config(
        architecture=architecture,
        layers=_positive(raw, "num_hidden_layers", where),
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=_head_dim(raw, hidden, heads, family, where),
        intermediate=_positive(raw, "intermediate_size", where),
        vocab=_positive(raw, "vocab_size", where),
        max_position=_positive(raw, "max_position_embeddings", where),
        tied=_flag(raw, "tie_word_embeddings", where),
        dtype_bytes=_dtype_bytes(raw, where),
        qkv_bias=qkv_bias,
        o_bias=_flag(raw, family.o_bias_key, where),
        mlp_bias=_flag(raw, family.mlp_bias_key, where),
        qk_norm=family.qk_norm,
    )


def _architecture(raw: dict[str, Any], where: Path) -> str:
    names = raw.get("architectures")
    known = ", ".join(FAMILIES)
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
        raise CheckpointError(f'{where}: "architectures" must name one of {known}, got {shown(names)}')
    name: str = names[0]
    if name not in FAMILIES:
        raise CheckpointError(f"{where}: architecture {name[:80]} is not supported; supported are {known}")
    return name


def _positive(raw: dict[str, Any], key: str, where: Path, *, default: int | None = None) -> int:
    value = raw.get(key)
    value = default if value is None else value
    if type(value) is not int or not 1 <= value <= LIMITS[key]:
        raise CheckpointError(f"{where}: expected {key} to be from 1 to {LIMITS[key]}, got {shown(value)}")
    return value


def _flag(raw: dict[str, Any], key: str | None, where: Path) -> bool:
    value = raw.get(key) if key else None
    if value is not None and not isinstance(value, bool):
        raise CheckpointError(f"{where}: expected {key} to be true or false, got {shown(value)}")
    return bool(value)


def _head_dim(raw: dict[str, Any], hidden: int, heads: int, family: Family, where: Path) -> int:
    if raw.get("head_dim") is not None:
        return _positive(raw, "head_dim", where)
    if family.default_head_dim:
        return family.default_head_dim
    if hidden % heads:
        raise CheckpointError(f"{where}: hidden_size {hidden} is not divisible by {heads} attention heads")
    return hidden // heads


def _dtype_bytes(raw: dict[str, Any], where: Path) -> int | None:
    """Bytes per element of the declared type; transformers 5 writes `dtype`, earlier ones `torch_dtype`."""
    name = raw.get("dtype", raw.get("torch_dtype"))
    if name is None:
        return None
    if not isinstance(name, str) or name not in CONFIG_DTYPES:
        raise CheckpointError(f"{where}: dtype {shown(name)} is not one of {', '.join(CONFIG_DTYPES)}")
    return CONFIG_DTYPES[name]


def _check_tokenizer(folder: Path) -> None:
    if not any(all(is_file(folder / name) for name in names) for names in TOKENIZERS):
        wanted = " or ".join(" with ".join(names) for names in TOKENIZERS)
        raise CheckpointError(f"expected a tokenizer ({wanted}) in {folder}, found none; save one there")


def _expected(config: Config) -> Shapes:
    expected, layer = config.other_shapes(), config.layer_shapes()
    for number in range(config.layers):
        expected.update({f"model.layers.{number}.{name}": shape for name, shape in layer.items()})
    return expected


def _check_tensors(config: Config, expected: Shapes, tensors: dict[str, TensorRef], folder: Path) -> None:
    none_missing(set(expected), set(tensors), folder)
    for name, shape in expected.items():
        _check_tensor(name, tensors[name], shape, folder)
    _none_left(set(tensors) - set(expected), config, folder)


def _check_tensor(name: str, info: TensorRef, shape: tuple[int, ...], folder: Path) -> None:
    if info.shape != shape:
        raise CheckpointError(f"{name} in {folder} has shape {info.shape}; config.json implies {shape}")
    if info.dtype not in FLOAT_DTYPES:
        raise CheckpointError(f"{name} in {folder} is {info.dtype}; expected {', '.join(STORED_DTYPES)}")


def _none_left(extra: set[str], config: Config, folder: Path) -> None:
    """Engines skip stored rotary tables, and a stored head when it is tied; anything else is an error."""
    odd = sorted(name for name in extra if not name.endswith("rotary_emb.inv_freq"))
    odd = [name for name in odd if not (config.tied and name == "lm_head.weight")]
    if odd:
        raise CheckpointError(
            f"{folder} holds {len(odd)} tensors that a {config.layers}-layer {config.architecture} "
            f"does not have, such as {', '.join(odd)[:300]}; correct config.json"
        )


def _stored_bytes(tensors: dict[str, TensorRef]) -> int:
    counts: Counter[str] = Counter()
    for info in tensors.values():
        if info.dtype in STORED_DTYPES:
            counts[info.dtype] += math.prod(info.shape)
    return STORED_DTYPES[max(sorted(counts), key=counts.__getitem__)]


def _elements(shapes: Shapes) -> int:
    return sum(math.prod(shape) for shape in shapes.values())
