"""A model as deep as the real one that holds only a few hidden layers, each of which runs many times.

MaverIQ's fingerprints (section 5.1) have one or two layers because all layers are alike. But such a shallow
model does not run like the deep one. The host, not the device, limits its speed; its pipeline has nothing to
overlap, and its graphs are small. Here layer i is layer i mod `distinct`. The engine launches, captures and
schedules the same work as for the whole model, with the weights and KV cache of `distinct` layers. The
results are meaningless, but the costs are right, as long as the distinct layers do not fit the device's
cache.

It replaces vLLM's offloader that does nothing, through which every architecture makes its layers.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import islice
from typing import Any

from profiler.patches.target import Target

WRAP = Target(
    "vllm.model_executor.offloader.base",
    "NoopOffloader.wrap_modules",
    ("modules_generator",),
    read={"0.26": "02e58cef63b4", "0.32": "e0b3b8ec42af"},
)
VARIABLE = "OSTINATO_DISTINCT_LAYERS"


def install() -> None:
    """Share layers in a process that will build a part of the model; does nothing without VARIABLE."""
    if VARIABLE in os.environ:
        WRAP.replace_once(lambda _: _shared_layers)


def _shared_layers(self: Any, modules: Iterator[Any], *others: Any) -> list[Any]:
    """Build the first few of `modules`, and repeat them for the layers of this pipeline stage."""
    layers = _layers_of_stage()
    distinct = list(islice(modules, min(layers, int(os.environ[VARIABLE]))))
    repeated = [distinct[i % len(distinct)] for i in range(layers)]
    _repeat_experts(len(distinct), layers)
    return repeated


def _layers_of_stage() -> int:
    from vllm.distributed.parallel_state import get_pp_group
    from vllm.distributed.utils import get_pp_indices

    total = _config().model_config.hf_text_config.num_hidden_layers
    stage = get_pp_group()
    start, end = get_pp_indices(total, stage.rank_in_group, stage.world_size)
    return int(end - start)


def _repeat_experts(distinct: int, layers: int) -> None:
    """Repeat the names of expert layers, since vLLM counts calls of expert layers against their list."""
    names = getattr(_config().compilation_config, "static_all_moe_layers", None)
    if names:
        names[:] = [names[i % distinct] for i in range(layers)]


def _config() -> Any:
    from vllm.config import get_current_vllm_config

    return get_current_vllm_config()
