"""`python -m workers.group.follower`: the ranks of a group's member whose engine is on another node.

It reads its order, a line of JSON, and ends with all its ranks when its standard input ends. The process that
started it holds the other end, and need not be alive to end it. If it ends by itself it writes the reason to
the descriptor `tell`. The model's name on its command line is for people who look at processes.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from multiprocessing import connection
from typing import Any

from pydantic import TypeAdapter

from workers.group.launch import Launch
from workers.group.members import Rendezvous
from workers.group.processes import when_stdin_ends
from workers.imports import uncollected
from workers.messages import EngineConfig
from workers.vllm_environment import fork_ranks


@dataclass(frozen=True)
class Order:
    """The order to run the `number`-th member of the group, on the node at `host_ip`."""

    config: EngineConfig
    number: int
    rendezvous: Rendezvous
    host_ip: str
    tell: int = 1


ORDERS = TypeAdapter(Order)


def main() -> None:
    order = ORDERS.validate_json(sys.stdin.buffer.readline())
    launch = Launch(order.config, order.rendezvous, order.host_ip, order.number)
    launch.begin()
    fork_ranks()
    when_stdin_ends(lambda: _end(launch))
    try:
        reason = serve(order, launch)
    except Exception as e:
        reason = str(launch.blame(e))
    os.write(order.tell, reason.encode())
    launch.close()
    os._exit(1)  # vLLM's threads would otherwise keep it alive


def serve(order: Order, launch: Launch) -> str:
    """Run the ranks until one ends; returns which one and how. Raises vLLM's errors if they do not start."""
    with uncollected():
        from vllm.usage.usage_lib import UsageContext
        from vllm.v1.executor.multiproc_executor import MultiprocExecutor

        from workers.group.vllm_arguments import vllm_arguments

    arguments = vllm_arguments(launch.config, launch.network_arguments())
    config = arguments.create_engine_config(usage_context=UsageContext.OPENAI_API_SERVER, headless=True)
    executor = MultiprocExecutor(config, monitor_workers=False)
    return first_to_end(executor.workers)


def first_to_end(workers: list[Any]) -> str:
    """Wait for the first process to end, and describe it. `workers` are vLLM's handles of its processes.
    Blocks.
    """
    by_sentinel = {worker.proc.sentinel: worker for worker in workers}
    ended = by_sentinel[connection.wait(list(by_sentinel))[0]]
    ended.proc.join()
    return f"rank {ended.rank} ended with exit code {ended.proc.exitcode} while serving"


def _end(launch: Launch) -> None:
    launch.close()
    os._exit(0)


if __name__ == "__main__":
    main()
