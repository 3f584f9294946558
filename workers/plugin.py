"""Ostinato's vLLM plug-in (entry point group `vllm.general_plugins`).

vLLM calls `register` in the API process, the engine core and every worker. So it must be cheap and may run
twice in one process.
"""

from __future__ import annotations

import multiprocessing

ENGINE_CORE = "EngineCore"  # vLLM's name for the scheduling process


def register() -> None:
    """Replace the adapter manager of vLLM's model runners by ours (`workers.variants.manager`).

    Also make vLLM's engine core and ranks end with the process that started them. The core forks its ranks
    and the process that compiles grammars first, and the cost of grammars per step is bounded.
    """
    from workers.group import grammar_process
    from workers.group.processes import die_with_parent
    from workers.patches.vllm import adapter_manager, grammar_backends, grammar_costs
    from workers.variants.manager import VariantManager
    from workers.vllm_environment import fork_ranks

    die_with_parent()
    if multiprocessing.current_process().name.startswith(ENGINE_CORE):
        fork_ranks()
        grammar_costs.install()
        grammar_backends.install()
        grammar_process.fork()
    adapter_manager.install(VariantManager)
