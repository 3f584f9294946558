"""Asks aiconfigurator, in the environment that has it: JSON lines of questions in, of answers out.

Imports nothing of ours: it is run as a file by another interpreter.
"""

from __future__ import annotations

import importlib
import json
import logging
import sys
import warnings
from typing import Any

REHEARSED_BY = "benchmarks.aiconfigurator"
GIB = 1 << 30


def main() -> None:
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    estimate = importlib.import_module("aiconfigurator.cli.api").cli_estimate
    for line in sys.stdin:
        print(json.dumps(answer(estimate, json.loads(line))), flush=True)


def answer(estimate: Any, asked: dict[str, Any]) -> dict[str, Any]:
    """TTFT and TPOT in seconds and a rank's bytes beside its KV cache; or why there are none."""
    try:
        found = estimate(**asked)
        memory = found.summary.get_memory()
    except Exception as error:
        return {"refused": f"{type(error).__name__}: {str(error)[:200]}"}
    return {
        "ttft_s": found.ttft / 1000,
        "tpot_s": found.tpot / 1000,
        "rank_bytes": (memory["total"] - memory["kvcache"]) * GIB,
        "database": found.backend_version,
    }


if __name__ == "__main__":
    main()
