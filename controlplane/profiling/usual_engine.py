"""The default engine of a deployment without requested sizes, by the kind of its devices. Pure.

Profiles measure such engines, and deployments get them (`controlplane.planning.engine_sizes`).
"""

from __future__ import annotations

from dataclasses import dataclass

from controlplane.settings import Settings
from placement.types import CPU

BATCHED_TOKENS = 2048  # most tokens of a step; longer prompts take several steps


@dataclass(frozen=True)
class UsualEngine:
    """An engine for at most `max_requests` at once, with at least `slots` for variants and a LoRA rank of
    `lora_rank`."""

    max_requests: int
    slots: int
    lora_rank: int


_ON_CPU = UsualEngine(16, 4, 16)
_ON_GPU = UsualEngine(128, 8, 64)


def usual_engine(kind: str, settings: Settings) -> UsualEngine:
    """The usual engine within this installation's limits."""
    usual = of_kind(kind)
    return UsualEngine(
        min(usual.max_requests, settings.concurrency),
        min(usual.slots, settings.max_variants),
        min(usual.lora_rank, settings.max_lora_rank),
    )


def of_kind(kind: str) -> UsualEngine:
    return _ON_CPU if kind == CPU else _ON_GPU
