"""PEFT LoRA folders, rank-stabilised (rsLoRA) included.

LoRA adds scaling * B A to a weight, scaling = alpha / rank, or alpha / sqrt(rank) for rsLoRA (Kalajdzievski,
2023). DoRA also divides each row of the sum by its norm, which no added pair of factors can represent:
it is refused.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from profiler.errors import AdapterError, CheckpointError
from profiler.files import MAX_CONFIG_BYTES, read_json, shown
from profiler.types import ModelSpec, TensorRef
from profiler.variants import peft
from profiler.variants.modules import merged_facts, require_float, require_module, total_bytes
from profiler.variants.peft import CONFIG, WEIGHTS, endings
from profiler.variants.types import (
    LoraManifest,
    LoraModule,
    ModuleFacts,
    VariantKind,
    VariantLimits,
    VariantSpec,
)

N = TypeVar("N", int, float)

TENSOR_NAME = re.compile(r"base_model\.model\.([\w.]+)\.lora_([AB])\.weight", re.ASCII)
PLAIN_PATTERN = re.compile(r"\w+(\\?\.\w+)*", re.ASCII)

# PEFT options that change what the weights mean and that the engine does not implement: any true value
# is refused (the same list as vLLM's PEFTHelper).
REFUSED = {
    "use_dora": "DoRA (it rescales the base's rows)",
    "modules_to_save": "fully trained modules (modules_to_save)",
    "lora_bias": "a bias on lora_B (lora_bias)",
    "alora_invocation_tokens": "activated LoRA",
    "layer_replication": "layer replication",
    "use_bdlora": "block-diagonal LoRA",
    "use_qalora": "QALoRA",
    "trainable_token_indices": "trained tokens (trainable_token_indices)",
    "target_parameters": "adapted parameters (target_parameters)",
}
# Initialisations by name that leave the base's weights as they were (all others, such as PiSSA, do not).
HARMLESS_INITS = frozenset({"gaussian", "eva", "orthogonal", "mica", "lora_ga"})


@dataclass(frozen=True)
class LoraConfig:
    """The checked part of adapter_config.json. `targets` is None when the tensors alone decide."""

    rank: int
    alpha: float
    rank_pattern: dict[str, int]
    alpha_pattern: dict[str, float]
    rank_stabilised: bool
    targets: frozenset[str] | None

    def rank_of(self, module_name: str) -> int:
        return _first_match(self.rank_pattern, module_name, self.rank)

    def scaling_of(self, module_name: str) -> float:
        rank = self.rank_of(module_name)
        alpha = _first_match(self.alpha_pattern, module_name, self.alpha)
        return alpha / (math.sqrt(rank) if self.rank_stabilised else rank)


def _first_match(patterns: dict[str, N], module_name: str, default: N) -> N:
    """PEFT's rule: the first pattern that is the name's ending, at a dot, wins."""
    if not patterns:
        return default
    matching = patterns.keys() & endings(module_name)
    return next((value for key, value in patterns.items() if key in matching), default)


def read(folder: Path, base: ModelSpec, limits: VariantLimits) -> LoraManifest:
    """Read and check the adapter in `folder` for `base`.

    Raises CheckpointError when files are missing, corrupt or incomplete, AdapterError when they are sound
    but do not fit the base or use what the engine lacks.
    """
    config = parse_config(read_json(folder / CONFIG, MAX_CONFIG_BYTES), base, limits.max_lora_rank)
    tensors, file = peft.read_weights(folder)
    modules = {
        name: _module(name, a, b, base, config) for name, (a, b) in _pairs(tensors, base, folder).items()
    }
    peft.check_targets(config.targets, modules)
    facts = ((name, ModuleFacts(total_bytes((m.a, m.b)), rank=m.rank)) for name, m in modules.items())
    spec = VariantSpec(VariantKind.LORA, total_bytes(tensors.values()), merged_facts(base, facts))
    return LoraManifest(folder, spec, (file,), modules)


def parse_config(raw: dict[str, Any], base: ModelSpec, max_rank: int) -> LoraConfig:
    """Check a parsed adapter_config.json. Raises AdapterError."""
    peft.require_type(raw, "LORA")
    peft.refuse_options(raw, REFUSED)
    _refuse_bias_and_init(raw)
    ranks, alphas = _pattern(raw, "rank_pattern"), _pattern(raw, "alpha_pattern")
    return LoraConfig(
        rank=_rank(raw.get("r"), "r", max_rank),
        alpha=_alpha(raw.get("lora_alpha")),
        rank_pattern={key: _rank(rank, key[:80], max_rank) for key, rank in ranks.items()},
        alpha_pattern={key: _alpha(alpha) for key, alpha in alphas.items()},
        rank_stabilised=_flag(raw.get("use_rslora")),
        targets=peft.parse_targets(raw.get("target_modules"), base),
    )


def _refuse_bias_and_init(raw: dict[str, Any]) -> None:
    bias = raw.get("bias", "none")
    if bias != "none":
        raise AdapterError(
            f'{CONFIG}: expected bias "none", got {shown(bias)}; trained biases are not supported'
        )
    init = raw.get("init_lora_weights")
    if isinstance(init, str) and init.lower() not in HARMLESS_INITS:
        raise AdapterError(
            f"{CONFIG}: init_lora_weights {init[:40]!r} changes the base's weights; "
            "convert the adapter with PEFT's path_initial_model_for_weight_conversion"
        )


def _pattern(raw: dict[str, Any], key: str) -> dict[str, Any]:
    pattern = raw.get(key) or {}
    if not isinstance(pattern, dict) or not all(PLAIN_PATTERN.fullmatch(name) for name in pattern):
        raise AdapterError(
            f"{CONFIG}: {key} must map plain module names to numbers; regexes are not supported"
        )
    return {name.replace("\\", ""): value for name, value in pattern.items()}


def _alpha(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 1e9:
        raise AdapterError(f"{CONFIG}: expected lora_alpha to be a number, got {shown(value)}")
    return float(value)


def _rank(value: Any, where: str, max_rank: int) -> int:
    if type(value) is not int or value < 1:
        raise AdapterError(f"{CONFIG}: rank {where} must be a positive integer, got {shown(value)}")
    if value > max_rank:
        raise AdapterError(
            f"{CONFIG}: rank {where} is {value}, above this cluster's limit of {max_rank}; "
            "start Ostinato with a larger OSTINATO_MAX_LORA_RANK, or train with a smaller rank"
        )
    return value


def _flag(value: Any) -> bool:
    if value is not None and not isinstance(value, bool):
        raise AdapterError(f"{CONFIG}: expected use_rslora to be true or false, got {shown(value)}")
    return bool(value)


def _pairs(
    tensors: dict[str, TensorRef], base: ModelSpec, folder: Path
) -> dict[str, tuple[TensorRef, TensorRef]]:
    """A and B of every module."""
    sides: dict[str, dict[str, TensorRef]] = {"A": {}, "B": {}}
    for name, ref in tensors.items():
        module, side = _classify(name, ref, base)
        sides[side][module] = ref
    lonely = sorted(set(sides["A"]) ^ set(sides["B"]))
    if lonely:
        raise CheckpointError(
            f"{folder / WEIGHTS}: {lonely[0]} has only one of lora_A and lora_B; copy the file again"
        )
    if not tensors:
        raise CheckpointError(f"{folder / WEIGHTS} holds no lora_A and lora_B pair; copy the file again")
    return {module: (a, sides["B"][module]) for module, a in sides["A"].items()}


def _classify(name: str, ref: TensorRef, base: ModelSpec) -> tuple[str, str]:
    match = TENSOR_NAME.fullmatch(name)
    if not match:
        raise AdapterError(
            f"{WEIGHTS}: {name[:200]!r} is not a LoRA matrix of a hidden layer; expected names like "
            "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
        )
    require_module(match[1], base, WEIGHTS)
    require_float(ref, WEIGHTS)
    return match[1], match[2]


def _module(name: str, a: TensorRef, b: TensorRef, base: ModelSpec, config: LoraConfig) -> LoraModule:
    """A pair whose shapes are (rank, in) and (out, rank)."""
    out, into = require_module(name, base, WEIGHTS)
    rank = config.rank_of(name)
    for side, ref, shape in (("A", a, (rank, into)), ("B", b, (out, rank))):
        if ref.shape != shape:
            raise AdapterError(
                f"{WEIGHTS}: lora_{side} of {name} has shape {ref.shape}; "
                f"rank {rank} on this base needs {shape}"
            )
    return LoraModule(a, b, rank, config.scaling_of(name))
