"""The settings about variants on which an engine's processes must agree; sent in vLLM's
`additional_config`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from profiler.variants.types import VariantKind

KEY = "ostinato"
# The scheduler's address for the ranks' loaders. It is not in `additional_config`: that is part of the key of
# vLLM's compilation cache, and the address differs from start to start.
ADDRESS_VARIABLE = "OSTINATO_VARIANT_BUS"
# The remedy if an engine was started for other variants.
REMEDY = (
    "run `ostinato tune BASE --place-anew`, which starts engines for all registered variants, then deploy "
    "the variant again (or undeploy its base and deploy it again)"
)


@dataclass(frozen=True)
class VariantConfig:
    """The settings about variants.

    At most `slots` variants may run in one batch (DeltaZip's N) in `arena_bytes` of each rank's memory.
    `host_bytes` of each rank's host memory keep others ready, and embeddings of those in slots. Only `kinds`
    can be served: a CUDA graph launches only their kernels. Scratch memory is made for LoRA ranks up to
    `max_rank` and low-rank deltas up to `max_svd_rank`. Once a request has been blocked for `longest_wait_s`,
    other variants must leave for it. With `merged_slot` each rank keeps a second copy of the base's weights
    (`workers.variants.merged_slot`).
    """

    slots: int
    arena_bytes: int
    host_bytes: int
    max_rank: int
    max_svd_rank: int = 2048
    kinds: tuple[str, ...] = tuple(kind.value for kind in VariantKind)
    longest_wait_s: float = 30.0
    merged_slot: bool = False

    def as_json(self) -> dict[str, Any]:
        return {KEY: asdict(self)}


def from_additional(additional: Mapping[str, Any], max_loras: int, max_rank: int) -> VariantConfig:
    """The configuration in vLLM's `additional_config`; without one, that of vLLM's own flags."""
    config = additional.get(KEY)
    if config is None:
        return VariantConfig(max_loras, 256 << 20, 1 << 30, max_rank)
    return VariantConfig(**{**config, "kinds": tuple(config["kinds"])})
