"""Our variant manager, in place of vLLM's manager of LoRA adapters.

vLLM's model runners make their manager by its name in the runners' module. vLLM has no option for another
manager.
"""

from __future__ import annotations

from profiler.patches.target import Target

MANAGER = Target(
    "vllm.v1.worker.lora_model_runner_mixin",
    "LRUCacheWorkerLoRAManager",
    read={"0.26": "c17f4a657ee9", "0.32": "c17f4a657ee9"},
)


def install(manager: type) -> None:
    """Make model runners that are built from now on in this process make `manager`."""
    MANAGER.replace_once(lambda _: manager)
