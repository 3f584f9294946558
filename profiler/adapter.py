"""From a PEFT LoRA adapter folder to an `AdapterSpec`, checked against its base. Reads headers only.

Nothing in an adapter is executed: `.bin` files (pickle) are refused, and patterns given as regular
expressions are compiled but never run, because a hostile one could take for ever. The tensors
themselves say which modules are adapted.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from profiler.checkpoint import block_of
from profiler.errors import AdapterError, CheckpointError
from profiler.files import FLOAT_DTYPES, TensorInfo, is_file, read_header, read_json, shown
from profiler.types import AdapterSpec, ModelSpec

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"

TENSOR_NAME = re.compile(
    r"base_model\.model\.model\.layers\.(0|[1-9][0-9]{0,3})\.(self_attn|mlp)\.(\w+)\.lora_([AB])\.weight",
    re.ASCII,
)
PLAIN_PATTERN = re.compile(r"\w+(\\?\.\w+)*", re.ASCII)

# PEFT options that change what the weights mean and that the engine does not implement: any true value
# is refused (the same list as vLLM's PEFTHelper).
REFUSED = {
    "use_dora": "DoRA",
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
    rank_pattern: dict[str, int]
    targets: frozenset[str] | None

    def rank_of(self, module_name: str) -> int:
        """PEFT's rule: the first pattern that is the name's ending, at a dot, wins."""
        matching = self.rank_pattern.keys() & endings(module_name)
        return next((rank for key, rank in self.rank_pattern.items() if key in matching), self.rank)


@dataclass(frozen=True)
class LoraTensor:
    """One A (rank, in) or B (out, rank) matrix and where it belongs."""

    layer: int
    module: str
    side: str
    info: TensorInfo

    @property
    def module_name(self) -> str:
        return f"model.layers.{self.layer}.{block_of(self.module)}.{self.module}"


def endings(module_name: str) -> set[str]:
    """Every target by which PEFT can mean this module: its whole name and its last parts."""
    parts = module_name.split(".")
    return {".".join(parts[start:]) for start in range(len(parts))}


def all_endings(module_names: Iterable[str]) -> set[str]:
    return set().union(*map(endings, module_names))


def read_adapter(folder: Path, base: ModelSpec, max_rank: int) -> AdapterSpec:
    """Read and check the adapter in `folder` for `base`.

    Raises CheckpointError when files are missing, corrupt or incomplete, AdapterError when they are sound
    but do not fit the base or use what the engine lacks. `rank` is the largest rank of any module.
    """
    config = parse_config(read_json(folder / CONFIG), base, max_rank)
    tensors = [_classify(name, info, base) for name, info in _read_weights(folder).items()]
    pairs = _pair(tensors, folder)
    ranks = [_check_pair(a, b, base, config) for a, b in pairs]
    modules = {a.module for a, _ in pairs}
    _check_targets_used(config, {a.module_name for a, _ in pairs})
    return AdapterSpec(
        rank=max(ranks),
        target_modules=tuple(module for module in base.linear_shapes if module in modules),
        weight_bytes=sum(tensor.info.size_bytes for tensor in tensors),
    )


def _read_weights(folder: Path) -> dict[str, TensorInfo]:
    if not is_file(folder / WEIGHTS) and is_file(folder / "adapter_model.bin"):
        raise CheckpointError(
            f"{folder} holds adapter_model.bin, which is pickle and can run code when read; "
            f"save it again with save_pretrained(safe_serialization=True) to get {WEIGHTS}"
        )
    return read_header(folder / WEIGHTS)


def parse_config(raw: dict[str, Any], base: ModelSpec, max_rank: int) -> LoraConfig:
    """Check a parsed adapter_config.json. Raises AdapterError."""
    if raw.get("peft_type") != "LORA":
        raise AdapterError(f"{CONFIG}: expected peft_type LORA, got {shown(raw.get('peft_type'))}")
    _refuse_options(raw)
    _check_alpha(raw)
    pattern = raw.get("rank_pattern") or {}
    if not isinstance(pattern, dict) or not all(PLAIN_PATTERN.fullmatch(key) for key in pattern):
        raise AdapterError(
            f"{CONFIG}: rank_pattern must map plain module names to ranks; regexes are not supported"
        )
    return LoraConfig(
        rank=_rank(raw.get("r"), "r", max_rank),
        rank_pattern={
            key.replace("\\", ""): _rank(rank, key[:80], max_rank) for key, rank in pattern.items()
        },
        targets=_targets(raw.get("target_modules"), base),
    )


def _refuse_options(raw: dict[str, Any]) -> None:
    for key, meaning in REFUSED.items():
        if raw.get(key):
            raise AdapterError(
                f"{CONFIG}: {meaning} is not supported; train a plain LoRA or merge it into a base"
            )
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


def _check_alpha(raw: dict[str, Any]) -> None:
    alphas = [raw.get("lora_alpha")]
    pattern = raw.get("alpha_pattern") or {}
    if not isinstance(pattern, dict):
        raise AdapterError(f"{CONFIG}: alpha_pattern must map module names to numbers")
    for alpha in [*alphas, *pattern.values()]:
        if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not abs(alpha) < 1e9:
            raise AdapterError(f"{CONFIG}: expected lora_alpha to be a number, got {shown(alpha)}")


def _rank(value: Any, where: str, max_rank: int) -> int:
    if type(value) is not int or value < 1:
        raise AdapterError(f"{CONFIG}: rank {where} must be a positive integer, got {shown(value)}")
    if value > max_rank:
        raise AdapterError(f"{CONFIG}: rank {where} is {value}, above this cluster's limit of {max_rank}")
    return value


def _targets(value: Any, base: ModelSpec) -> frozenset[str] | None:
    """Listed targets, each checked to exist in the base; None for "all-linear" and regexes."""
    if isinstance(value, str) and value:
        if value != "all-linear":
            _check_regex(value)
        return None
    if not isinstance(value, list) or not value or not all(isinstance(item, str) for item in value):
        raise AdapterError(f"{CONFIG}: expected target_modules to be a list of names or a pattern")
    known = all_endings(_module_names(base))
    lacking = [target for target in value if target not in known]
    if lacking:
        raise AdapterError(
            f"{CONFIG}: the base ({base.architecture}) has no adaptable module {', '.join(lacking)[:200]}; "
            f"it has {', '.join(base.linear_shapes)}"
        )
    return frozenset(value)


def _check_regex(pattern: str) -> None:
    try:
        if len(pattern) > 10_000:
            raise ValueError("longer than 10000 characters")
        re.compile(pattern)
    except (ValueError, re.error, RecursionError, OverflowError) as error:
        raise AdapterError(f"{CONFIG}: target_modules is not a valid regular expression ({error})") from error


def _module_names(base: ModelSpec) -> list[str]:
    layers = range(base.num_layers)
    return [f"model.layers.{n}.{block_of(module)}.{module}" for n in layers for module in base.linear_shapes]


def _classify(name: str, info: TensorInfo, base: ModelSpec) -> LoraTensor:
    match = TENSOR_NAME.fullmatch(name)
    if not match:
        raise AdapterError(
            f"{WEIGHTS}: {name[:200]!r} is not a LoRA matrix of a hidden layer; expected names like "
            "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
        )
    layer, block, module, side = int(match[1]), match[2], match[3], match[4]
    if module not in base.linear_shapes or block != block_of(module):
        raise AdapterError(
            f"{WEIGHTS}: the base has no module {block}.{module[:80]}; it has {', '.join(base.linear_shapes)}"
        )
    if layer >= base.num_layers:
        raise AdapterError(
            f"{WEIGHTS}: {name[:200]} is of layer {layer}, but the base has {base.num_layers} layers"
        )
    if info.dtype not in FLOAT_DTYPES:
        raise AdapterError(
            f"{WEIGHTS}: {name[:200]} has dtype {info.dtype}; not {', '.join(sorted(FLOAT_DTYPES))}"
        )
    return LoraTensor(layer, module, side, info)


def _pair(tensors: list[LoraTensor], folder: Path) -> list[tuple[LoraTensor, LoraTensor]]:
    sides: dict[str, dict[str, LoraTensor]] = {"A": {}, "B": {}}
    for tensor in tensors:
        sides[tensor.side][tensor.module_name] = tensor
    lonely = sorted(set(sides["A"]) ^ set(sides["B"]))
    if lonely:
        raise CheckpointError(
            f"{folder / WEIGHTS}: {lonely[0]} has only one of lora_A and lora_B; copy the file again"
        )
    if not tensors:
        raise CheckpointError(f"{folder / WEIGHTS} holds no lora_A and lora_B pair")
    return [(a, sides["B"][name]) for name, a in sides["A"].items()]


def _check_pair(a: LoraTensor, b: LoraTensor, base: ModelSpec, config: LoraConfig) -> int:
    """The rank of a pair whose shapes are (rank, in) and (out, rank)."""
    out, into = base.linear_shapes[a.module]
    rank = config.rank_of(a.module_name)
    for tensor, shape in ((a, (rank, into)), (b, (out, rank))):
        if tensor.info.shape != shape:
            raise AdapterError(
                f"{WEIGHTS}: lora_{tensor.side} of {a.module_name} has shape {tensor.info.shape}; "
                f"rank {rank} on this base needs {shape}"
            )
    if config.targets is not None and not config.targets & endings(a.module_name):
        raise AdapterError(f"{WEIGHTS}: {a.module_name} has weights but target_modules does not name it")
    return rank


def _check_targets_used(config: LoraConfig, adapted: set[str]) -> None:
    unused = sorted((config.targets or frozenset()) - all_endings(adapted))
    if unused:
        raise CheckpointError(
            f"{WEIGHTS}: target_modules names {', '.join(unused)[:200]}, but no tensor adapts it"
        )
