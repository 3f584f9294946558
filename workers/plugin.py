"""Ostinato's vLLM plug-in (entry point group `vllm.general_plugins`).

vLLM calls `register` in the API process, the engine core and every worker, so it must be cheap and
may run twice in one process.
"""

from __future__ import annotations


def register() -> None:
    """On CPU, replace vLLM's LoRA arithmetic (see `workers.cpu_lora`); elsewhere, change nothing yet."""
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        platform = type(current_platform)
        platform.get_punica_wrapper = classmethod(lambda cls: "workers.cpu_lora.CpuLora")
