"""RoPE's numbers in a model's config, in any of their forms. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

THETA, THETAS = 10_000.0, {"mixtral": 1_000_000.0}  # of a config that has none; by model type
PRETRAINED_LENGTH = ("llama3", "yarn", "longrope")  # kinds that depend on the length used in training
OLDER = {
    "rope_theta": ("rope_theta", "rotary_emb_base"),
    "partial_rotary_factor": ("partial_rotary_factor", "rotary_pct"),
}
PLAIN = {"rope_type": "default", "partial_rotary_factor": 1.0}


def rope_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """RoPE's numbers as transformers 5 writes them, in one object (Gemma 3: one for each kind of layer).

    Numbers without effect are left out. `rope_theta` is always present.
    """
    given: dict[str, Any] = {}
    for key in ("rope_scaling", "rope_parameters"):
        given |= config[key] if isinstance(config.get(key), dict) else {}
    if any(isinstance(value, dict) for value in given.values()):
        return {kind: _numbers(part or {}, config) for kind, part in given.items()}
    local = config.get("rope_local_base_freq")
    if local is None:
        return _numbers(given, config)
    return {
        "full_attention": _numbers(given, config),
        "sliding_attention": _numbers({"rope_theta": local}, config),
    }


def _numbers(given: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    rope = {key: value for key, value in given.items() if value is not None}
    for key, names in OLDER.items():
        for name in names:
            if config.get(name) is not None:
                rope.setdefault(key, config[name])
    rope.setdefault("rope_theta", THETAS.get(str(config.get("model_type")), THETA))
    older = rope.pop("type", "default")
    kind = rope.setdefault("rope_type", older)
    length = config.get("original_max_position_embeddings", config.get("max_position_embeddings"))
    if kind in PRETRAINED_LENGTH and length is not None:
        rope.setdefault("original_max_position_embeddings", length)
    return {key: value for key, value in rope.items() if PLAIN.get(key) != value}
