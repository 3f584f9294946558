"""Ostinato's vLLM plug-in (entry point group `vllm.general_plugins`).

vLLM calls `register` in the API process, the engine core and every worker, so it must be cheap and
may run twice in one process.
"""

from __future__ import annotations


def register() -> None:
    """Give vLLM's model runners our manager of adapters (`workers.variants.manager`) for its own."""
    import vllm.v1.worker.lora_model_runner_mixin as runners

    from workers.variants.manager import VariantManager

    runners.LRUCacheWorkerLoRAManager = VariantManager
