"""Checked access to a parsed config.json: values of a wrong type or range are refused, naming the key."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from profiler.errors import CheckpointError
from profiler.files import shown

# The largest plausible values: a config with larger values is a mistake or an attack.
LIMITS = {
    "num_hidden_layers": 1_024,
    "hidden_size": 131_072,
    "num_attention_heads": 1_024,
    "num_key_value_heads": 1_024,
    "head_dim": 1_024,
    "intermediate_size": 1_048_576,
    "vocab_size": 2_000_000,
    "max_position_embeddings": 100_000_000,
    "num_experts": 4_096,
}
LIMITS.update(
    {
        "n_layer": LIMITS["num_hidden_layers"],
        "n_embd": LIMITS["hidden_size"],
        "n_head": LIMITS["num_attention_heads"],
        "n_inner": LIMITS["intermediate_size"],
        "n_positions": LIMITS["max_position_embeddings"],
        "num_kv_heads": LIMITS["num_key_value_heads"],
        "ffn_hidden_size": LIMITS["intermediate_size"],
        "rotary_dim": LIMITS["head_dim"],
        "num_ln_in_parallel_attn": 2,
        "moe_intermediate_size": LIMITS["intermediate_size"],
        "shared_expert_intermediate_size": LIMITS["intermediate_size"],
        "num_local_experts": LIMITS["num_experts"],
        "num_experts_per_tok": LIMITS["num_experts"],
        "sliding_window": LIMITS["max_position_embeddings"],
        "sliding_window_pattern": LIMITS["num_hidden_layers"],
    }
)
LAYER_TYPES = ("full_attention", "sliding_attention")


class ConfigReader:
    """The keys of one config.json; a null value counts as absent. Every method raises CheckpointError."""

    def __init__(self, raw: Mapping[str, Any], where: Path) -> None:
        self.raw = raw
        self._where = where

    @property
    def architecture(self) -> str:
        """The architecture's name; the registry has checked that there is exactly one."""
        return str(self.raw["architectures"][0])

    def refuse(self, reason: str) -> NoReturn:
        raise CheckpointError(f"{self._where}: {reason}")

    def positive(self, key: str, default: int | None = None, alias: str | None = None) -> int:
        """A whole number from 1 to the key's limit; `alias` is another name that transformers accepts."""
        key = self._spelled(key, alias)
        value = self.raw.get(key)
        value = default if value is None else value
        if type(value) is not int or not 1 <= value <= LIMITS[key]:
            self.refuse(f"expected {key} to be from 1 to {LIMITS[key]}, got {shown(value)}")
        return value

    def optional(self, key: str) -> int | None:
        """As `positive`; None if the key is absent."""
        return None if self.raw.get(key) is None else self.positive(key)

    def natural(self, key: str, default: int) -> int:
        """A number of layers, 0 included; any number larger than the model's means all layers."""
        value = self.raw.get(key)
        value = default if value is None else value
        if type(value) is not int or not 0 <= value < 2**31:
            self.refuse(f"expected {key} to be a natural number, got {shown(value)}")
        return value

    def flag(self, key: str, default: bool = False) -> bool:
        value = self.raw.get(key)
        if value is not None and not isinstance(value, bool):
            self.refuse(f"expected {key} to be true or false, got {shown(value)}")
        return default if value is None else value

    def layer_types(self, layers: int) -> list[str] | None:
        """The kind of attention of every layer, if the config lists it."""
        types = self.raw.get("layer_types")
        if types is None:
            return None
        if not isinstance(types, list) or not all(isinstance(t, str) and t in LAYER_TYPES for t in types):
            self.refuse(f"expected layer_types to list {' or '.join(LAYER_TYPES)}, got {shown(types)}")
        if len(types) != layers:
            self.refuse(
                f"expected layer_types to have an entry for each of the {layers} layers, got {len(types)}"
            )
        return types

    def must(self, key: str, holds: bool, needed: str, reason: str) -> None:
        """Refuse a valid value that the engine cannot handle."""
        if not holds:
            self.refuse(f"expected {key} to be {needed}, got {shown(self.raw.get(key))}: {reason}")

    def _spelled(self, key: str, alias: str | None) -> str:
        """The one of both names that the config uses; if it uses both, their values must be equal."""
        if alias is None or self.raw.get(alias) is None:
            return key
        if self.raw.get(key) is None:
            return alias
        if self.raw[key] != self.raw[alias]:
            self.refuse(
                f"{key} is {shown(self.raw[key])}, but {alias} is {shown(self.raw[alias])}; give both the "
                "same value"
            )
        return key
