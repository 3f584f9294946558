"""PEFT LoRA folders, rank-stabilised (rsLoRA) included.

LoRA adds scaling * B A to a weight, scaling = alpha / rank, or alpha / sqrt(rank) for rsLoRA (Kalajdzievski,
2023). DoRA is refused: it also divides each row of the sum by its norm, which no added pair of factors can
represent.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from profiler.errors import AdapterError, CheckpointError
from profiler.files import MAX_CONFIG_BYTES, read_json, shown
from profiler.types import ModelSpec, TensorRef
from profiler.variants import peft
from profiler.variants.modules import merged_facts, require_float, require_module, total_bytes
from profiler.variants.name_patterns import NamePattern
from profiler.variants.odd_names import CONFIG, MERGE, MODULES, RANKS, TRAINED_ON, WEIGHTS
from profiler.variants.peft import endings
from profiler.variants.told_ranks import ranks_as_config
from profiler.variants.types import (
    LoraManifest,
    LoraModule,
    ModuleFacts,
    VariantKind,
    VariantLimits,
    VariantSpec,
)

N = TypeVar("N", int, float)
Patterns = tuple[tuple[str | NamePattern, N], ...]

TENSOR_NAME = re.compile(r"base_model\.model\.([\w.]+)\.lora_([AB])\.weight", re.ASCII)
PLAIN_PATTERN = re.compile(r"\w+(\\?\.\w+)*", re.ASCII)
MAX_PATTERNS = 10_000

# PEFT options that change what the weights mean and that the engine does not implement (the same list as
# vLLM's PEFTHelper). Any true value is refused.
REFUSED = {
    "use_dora": "DoRA, which rescales the base's rows, is",
    "modules_to_save": "modules trained as a whole are",
    "lora_bias": "a bias on lora_B is",
    "alora_invocation_tokens": "activated LoRA is",
    "layer_replication": "replication of layers is",
    "use_bdlora": "block-diagonal LoRA is",
    "use_qalora": "QALoRA is",
    "trainable_token_indices": "trained rows of the embedding are",
    "target_parameters": "adapters of parameters outside linear layers are",
    "kasa_config": "KaSA, which also changes the base's weights, is",
    "velora_config": "VeLoRA is",
    "monteclora_config": "MonteCLoRA is",
    "arrow_config": "Arrow, which chooses among adapters, is",
}
# Keys that do not change the weights, or that describe their training.
HARMLESS = (
    "task_type", "peft_type", "peft_version", "auto_mapping", "base_model_name_or_path", "revision",
    "inference_mode", "lora_dropout", "fan_in_fan_out", "layers_pattern", "megatron_config", "megatron_core",
    "loftq_config", "eva_config", "corda_config", "lora_ga_config", "qalora_group_size", "runtime_config",
    "ensure_weight_tying",
)  # fmt: skip
READ = (
    "r", "lora_alpha", "bias", "use_rslora", "rank_pattern", "alpha_pattern", "init_lora_weights",
    "target_modules", "exclude_modules", "layers_to_transform",
)  # fmt: skip
CLASSIFYING = ("SEQ_CLS", "TOKEN_CLS", "QUESTION_ANS")
DEFAULT_RANK = DEFAULT_ALPHA = 8  # PEFT's defaults
# Named initialisations that do not change the base's weights (all others, such as PiSSA, do).
HARMLESS_INITS = frozenset({"gaussian", "eva", "orthogonal", "mica", "lora_ga"})
CHANGING_INITS = ("pissa", "olora", "corda", "loftq")
REPEATED_INITS = frozenset({"pissa", "olora"})  # the change follows from the base; others draw or read data


@dataclass(frozen=True)
class LoraConfig:
    """The checked part of adapter_config.json."""

    rank: int
    alpha: float
    rank_pattern: Patterns[int]
    alpha_pattern: Patterns[float]
    rank_stabilised: bool
    targets: peft.Targets

    def rank_of(self, module_name: str) -> int:
        return _first_match(self.rank_pattern, module_name, self.rank)

    def scaling_of(self, module_name: str) -> float:
        rank = self.rank_of(module_name)
        alpha = _first_match(self.alpha_pattern, module_name, self.alpha)
        return alpha / (math.sqrt(rank) if self.rank_stabilised else rank)


def _first_match(patterns: Patterns[N], module_name: str, default: N) -> N:
    """PEFT's rule: the first pattern that equals an ending of the name, from a dot on, wins. Raises
    AdapterError."""
    ends = endings(module_name)
    try:
        for pattern, value in patterns:
            if pattern in ends if isinstance(pattern, str) else pattern.matches(module_name):
                return value
    except ValueError as error:
        raise AdapterError(f"{CONFIG}: a pattern for ranks or alphas cannot be used: {error}") from error
    return default


def read(folder: Path, base: ModelSpec, limits: VariantLimits) -> LoraManifest:
    """Read and check the adapter in `folder` for `base`.

    Raises CheckpointError when files are missing, corrupt or incomplete; AdapterError when they are sound
    but do not fit the base or need what the engine lacks.
    """
    config = parse_config(read_json(folder / CONFIG, MAX_CONFIG_BYTES), limits.max_lora_rank)
    tensors, file = peft.read_weights(folder)
    pairs = _pairs(tensors, base, folder)
    ranks = {name.removeprefix("model."): a.shape[0] for name, (a, _) in pairs.items() if a.shape}
    modules = {name: _module(name, a, b, base, config, ranks) for name, (a, b) in pairs.items()}
    peft.check_targets(config.targets, modules)
    facts = ((name, ModuleFacts(total_bytes((m.a, m.b)), rank=m.rank)) for name, m in modules.items())
    spec = VariantSpec(VariantKind.LORA, total_bytes(tensors.values()), merged_facts(base, facts))
    return LoraManifest(folder, spec, (file,), modules)


def parse_config(raw: dict[str, Any], max_rank: int) -> LoraConfig:
    """Check a parsed adapter_config.json. Raises AdapterError."""
    peft.require_type(raw, "LORA")
    if raw.get("task_type") in CLASSIFYING and raw.get("modules_to_save"):
        raise AdapterError(
            f"{CONFIG}: task_type is {raw['task_type']}: the adapter has a head that classifies, which is "
            "not served; train an adapter that generates text (task_type CAUSAL_LM), or choose another "
            "adapter"
        )
    peft.refuse_options(raw, REFUSED)
    _refuse_bias_and_init(raw)
    ranks, alphas = _pattern(raw, "rank_pattern"), _pattern(raw, "alpha_pattern")
    return LoraConfig(
        rank=_rank(raw.get("r", DEFAULT_RANK), "r", max_rank),
        alpha=_alpha(raw.get("lora_alpha", DEFAULT_ALPHA)),
        rank_pattern=tuple((key, _rank(rank, text[:80], max_rank)) for text, key, rank in ranks),
        alpha_pattern=tuple((key, _alpha(alpha)) for _, key, alpha in alphas),
        rank_stabilised=_flag(raw.get("use_rslora")),
        targets=peft.parse_targets(raw),
    )


def _refuse_bias_and_init(raw: dict[str, Any]) -> None:
    bias = raw.get("bias", "none")
    if bias != "none":
        raise AdapterError(
            f'{CONFIG}: expected bias "none", got {shown(bias)}: biases that were trained with LoRA are not '
            "served; "
            f"{MERGE}"
        )
    init = raw.get("init_lora_weights")
    if not isinstance(init, str) or init.lower() in HARMLESS_INITS:
        return
    if init.lower() in REPEATED_INITS:
        raise AdapterError(
            f"{CONFIG}: init_lora_weights is {init!r}, which changed the base's weights before training, so "
            "the adapter fits only the changed base. PEFT repeats this change when it loads the adapter to "
            f"merge it; {MERGE}"
        )
    if init.lower().startswith(CHANGING_INITS):
        raise AdapterError(
            f"{CONFIG}: init_lora_weights is {init[:40]!r}, which changed the base's weights before training "
            "in a way that PEFT does not repeat when it loads the adapter; ask the adapter's author for the "
            "merged model, or, if you train the adapter, save the merged model at the end: "
            "`model.merge_and_unload().save_pretrained(folder)`. If you kept the adapter's folder INITIAL "
            "from before the training, `model.save_pretrained(folder, "
            "path_initial_model_for_weight_conversion=INITIAL)` makes an adapter of the unchanged base"
        )
    if init.lower() in ("true", "false"):
        raise AdapterError(
            f"{CONFIG}: init_lora_weights is the text {init!r}; write {init.lower()} without quotes in that "
            "file, and register the adapter again"
        )
    raise AdapterError(
        f"{CONFIG}: init_lora_weights has the unknown value {init[:40]!r}; if this initialisation did not "
        "change the base's weights, write true in its place and register the adapter again; otherwise "
        f"{MERGE}"
    )


def _pattern(raw: dict[str, Any], key: str) -> list[tuple[str, str | NamePattern, Any]]:
    """Each pattern as written, its form for matching, and its value."""
    pattern = raw.get(key) or {}
    if not isinstance(pattern, dict) or len(pattern) > MAX_PATTERNS:
        raise AdapterError(
            f"{CONFIG}: expected {key} to map names of modules to numbers, got {shown(pattern)}"
        )
    return [(text, _compiled(text, key), value) for text, value in pattern.items()]


def _compiled(text: str, key: str) -> str | NamePattern:
    if PLAIN_PATTERN.fullmatch(text):
        return text.replace("\\", "")
    try:
        return NamePattern(text)
    except ValueError as error:
        raise AdapterError(
            f"{CONFIG}: {key} has a pattern that cannot be used, {text[:80]!r}: {error}; the pattern "
            "names each module for which Python's re.match(PATTERN, NAME) is not None; in that file "
            f"{RANKS if key == 'rank_pattern' else MODULES}, and register the adapter again"
        ) from error


def _alpha(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 1e9:
        raise AdapterError(f"{CONFIG}: expected lora_alpha to be a number, got {shown(value)}")
    return float(value)


def _rank(value: Any, where: str, max_rank: int) -> int:
    if type(value) is not int or value < 1:
        raise AdapterError(f"{CONFIG}: expected rank {where} to be a positive integer, got {shown(value)}")
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
        raise CheckpointError(
            f"{folder / WEIGHTS} has no tensors: the adapter was saved before its weights were gathered; for "
            'DeepSpeed ZeRO-3 write "stage3_gather_16bit_weights_on_model_save": true in zero_optimization '
            "of its config, for FSDP save with trainer.accelerator.state.fsdp_plugin.set_state_dict_type("
            '"FULL_STATE_DICT"); load the last checkpoint, and save the adapter again with save_pretrained. '
            "If you downloaded the adapter, ask its author to do this, or choose another adapter: this file "
            "has no weights"
        )
    return {module: (a, sides["B"][module]) for module, a in sides["A"].items()}


def _classify(name: str, ref: TensorRef, base: ModelSpec) -> tuple[str, str]:
    peft.require_known(ref, base)
    match = TENSOR_NAME.fullmatch(name)
    if not match:
        raise AdapterError(
            f"{WEIGHTS}: expected LoRA matrices of hidden layers, got {name[:200]!r}; expected names like "
            "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight, as PEFT saves them"
        )
    require_module(match[1], base, WEIGHTS)
    require_float(ref, WEIGHTS)
    return match[1], match[2]


def _of_shape(side: str, ref: TensorRef, shape: tuple[int, ...], ranks: Mapping[str, int]) -> str:
    """What to do: if the shape's other side is right, the ranks differ, otherwise the bases differ."""
    at = 0 if side == "A" else 1
    if len(ref.shape) == 2 and ref.shape[1 - at] == shape[1 - at]:
        if side == "B":
            return "its lora_A has that rank, so the file is damaged: save or download the adapter again"
        return f"in that config write {ranks_as_config(ranks)}, and register the adapter again"
    return f"register the adapter with {TRAINED_ON}"


def _module(
    name: str, a: TensorRef, b: TensorRef, base: ModelSpec, config: LoraConfig, ranks: Mapping[str, int]
) -> LoraModule:
    """The module of a pair of tensors, after checking their shapes (rank, in) and (out, rank)."""
    out, into = require_module(name, base, WEIGHTS)
    rank = config.rank_of(name)
    for side, ref, shape in (("A", a, (rank, into)), ("B", b, (out, rank))):
        if ref.shape != shape:
            raise AdapterError(
                f"{WEIGHTS}: lora_{side} of {name} has shape {ref.shape}, but rank {rank} (by {CONFIG}) on "
                f"this base needs {shape}; {_of_shape(side, ref, shape, ranks)}"
            )
    return LoraModule(a, b, rank, config.scaling_of(name))
