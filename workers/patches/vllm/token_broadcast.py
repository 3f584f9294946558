"""Another process group for the sampled tokens that a pipeline's last stage broadcasts.

vLLM broadcasts them with NCCL, which uses a part of the other stages' GPUs while it waits. The replacement is
`workers.group.token_broadcast`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from profiler.patches.target import Target

HANDLER = Target(
    "vllm.v1.worker.gpu.pp_utils",
    "PPHandler.__init__",
    parameters=("max_num_reqs", "num_speculative_steps", "device"),
    read={"0.26": "3415d6c09029", "0.32": "59811933ff5e"},
)


def install(group_for: Callable[[int, int, Any], Any], handler: Any = None) -> None:
    """Make handlers that are built from now on in this process use the group that `group_for` makes.

    `group_for` gets the arguments of the handler, and returns None where vLLM's group is to be used.
    `handler` is the handlers' class; without it, vLLM's.
    """

    def put(made: Any, max_num_reqs: int, num_speculative_steps: int, device: Any) -> None:
        group = group_for(max_num_reqs, num_speculative_steps, device)
        if group is not None:
            made.broadcast_group = group

    HANDLER.call_after(put, handler)
