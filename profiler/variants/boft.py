"""PEFT BOFT folders: butterfly-orthogonal fine-tuning (Liu et al., ICLR 2024; served by SpartanServe).

Per module PEFT stores `boft_R` [m, in/b, b, b] and `boft_s` [out, 1], and biases as `bias` or (newer)
`base_layer.bias`. PEFT 0.11 and 0.12 also stored `boft_P`, the permutations. They follow from m and b, so
`boft_P` is ignored. Without its CUDA extension PEFT always trains with m = 1, but writes the config
unchanged: such a file holds `boft_R` [1, ...] although `boft_n_butterfly_factor` is larger. The tensors show
what was trained, so such folders are read with m = 1.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from profiler.errors import AdapterError, CheckpointError
from profiler.files import MAX_CONFIG_BYTES, read_json, shown
from profiler.types import ModelSpec, TensorRef
from profiler.variants import peft
from profiler.variants.modules import (
    merged_facts,
    require_float,
    require_full,
    require_module,
    require_shape,
    total_bytes,
)
from profiler.variants.odd_names import CONFIG, WEIGHTS
from profiler.variants.types import BoftManifest, BoftModule, ModuleFacts, VariantKind, VariantSpec

TENSOR_NAME = re.compile(r"base_model\.model\.([\w.]+)\.(boft_[RsP])", re.ASCII)
BIAS_NAME = re.compile(r"base_model\.model\.([\w.]+?)(\.base_layer)?\.bias", re.ASCII)
REFUSED = {"modules_to_save": "modules trained as a whole are"}
MAX_FACTORS = 16
DEFAULT_BLOCK_SIZE = 4  # PEFT's default


@dataclass(frozen=True)
class BoftConfig:
    """The checked part of adapter_config.json; exactly one of `block_size` and `block_num` is not 0."""

    block_size: int
    block_num: int
    factors: int
    bias: str
    targets: peft.Targets

    def block_size_of(self, name: str, into: int) -> int:
        """The block size of a module. Raises AdapterError when the blocks do not divide its inputs."""
        divisor = self.block_size or self.block_num
        if into % divisor:
            raise AdapterError(
                f"{CONFIG}: {name} has {into} inputs, which are not divisible by the blocks ({divisor}); "
                "register the adapter with the base that it was trained on"
            )
        return self.block_size or into // self.block_num


def read(folder: Path, base: ModelSpec) -> BoftManifest:
    """Read and check the adapter in `folder` for `base`; errors as in `profiler.variants.lora.read`."""
    config = parse_config(read_json(folder / CONFIG, MAX_CONFIG_BYTES))
    tensors, file = peft.read_weights(folder)
    parts, full = _sort(tensors, base, config)
    modules = {name: _module(name, part, base, config) for name, part in parts.items()}
    if not modules:
        raise CheckpointError(f"{folder / WEIGHTS} has no pair of boft_R and boft_s; copy the file again")
    peft.check_targets(config.targets, modules)
    facts = [
        (name, ModuleFacts(total_bytes((m.r, m.s)), factors=m.factors, block_size=m.block_size))
        for name, m in modules.items()
    ]
    stored = [ref for m in modules.values() for ref in (m.r, m.s)] + list(full.values())
    spec = VariantSpec(
        VariantKind.BOFT,
        total_bytes(stored),
        merged_facts(base, facts),
        full_bytes=total_bytes(full.values()),
    )
    return BoftManifest(folder, spec, (file,), modules, full=full)


def parse_config(raw: dict[str, Any]) -> BoftConfig:
    """Check a parsed adapter_config.json. Raises AdapterError."""
    peft.require_type(raw, "BOFT")
    peft.refuse_options(raw, REFUSED)
    bias = raw.get("bias", "none")
    if bias not in ("none", "all", "boft_only"):
        raise AdapterError(f"{CONFIG}: expected bias to be none, all or boft_only, got {shown(bias)}")
    size = _natural(raw, "boft_block_size", DEFAULT_BLOCK_SIZE)
    number = _natural(raw, "boft_block_num", 0)
    if (size == 0) == (number == 0):
        raise AdapterError(
            f"{CONFIG}: expected exactly one of boft_block_size and boft_block_num to be set, "
            f"got {size} and {number}"
        )
    factors = _natural(raw, "boft_n_butterfly_factor", 1)
    if not 1 <= factors <= MAX_FACTORS:
        raise AdapterError(
            f"{CONFIG}: expected boft_n_butterfly_factor to be from 1 to {MAX_FACTORS}, got {factors}"
        )
    targets = peft.parse_targets(raw)
    return BoftConfig(size, number, factors, bias, targets)


def _natural(raw: dict[str, Any], key: str, default: int) -> int:
    value = raw.get(key, default)
    if type(value) is not int or not 0 <= value < 2**31:
        raise AdapterError(f"{CONFIG}: expected {key} to be a natural number, got {shown(value)}")
    return value


def _sort(
    tensors: dict[str, TensorRef], base: ModelSpec, config: BoftConfig
) -> tuple[dict[str, dict[str, TensorRef]], dict[str, TensorRef]]:
    """boft_R and boft_s by module, and biases by the base's name for them."""
    parts: dict[str, dict[str, TensorRef]] = {}
    biases: dict[str, TensorRef] = {}
    for name, ref in sorted(tensors.items()):  # `base_layer.bias` comes before `bias`, its alias in old files
        if match := TENSOR_NAME.fullmatch(name):
            parts.setdefault(match[1], {})[match[2]] = ref
        elif match := BIAS_NAME.fullmatch(name):
            biases.setdefault(f"{match[1]}.bias", ref)
        else:
            peft.require_known(ref, base)
            raise AdapterError(
                f"{WEIGHTS}: expected only tensors of a BOFT adapter, got {name[:200]!r}; expected names "
                "like base_model.model.model.layers.0.self_attn.q_proj.boft_R"
            )
    for name, ref in biases.items():
        if config.bias == "none":
            raise AdapterError(
                f"{WEIGHTS} has {name}, but {CONFIG} says bias none; save the adapter again with "
                "save_pretrained"
            )
        require_full(ref, name, base, WEIGHTS)
    return parts, biases


def _module(name: str, parts: dict[str, TensorRef], base: ModelSpec, config: BoftConfig) -> BoftModule:
    out, into = require_module(name, base, WEIGHTS)
    if "boft_R" not in parts or "boft_s" not in parts:
        raise CheckpointError(f"{WEIGHTS}: {name} has only one of boft_R and boft_s; copy the file again")
    r, s = parts["boft_R"], parts["boft_s"]
    for ref in (r, s):
        require_float(ref, WEIGHTS)
    size = config.block_size_of(name, into)
    factors = 1 if r.shape[:1] == (1,) else config.factors
    require_shape(r, (factors, into // size, size, size), WEIGHTS)
    require_shape(s, (out, 1), WEIGHTS)
    if factors > 1 and (size % 2 or into % (size * 2 ** (factors - 1))):
        raise AdapterError(
            f"{CONFIG}: {factors} butterfly factors of blocks of {size} do not fit the {into} inputs of "
            f"{name}; expected an even block size, and inputs divisible by it times 2^{factors - 1}"
        )
    return BoftModule(r, s, factors, size)
