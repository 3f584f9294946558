"""Times the variant kernels on a CUDA device, each operation in a process of its own.

    python -m benchmarks.kernels [OPERATION ...] [--where KEY=VALUE[,VALUE] ...] [--out FOLDER]
                                 [--budget-s SECONDS]

Every case is checked before it is timed; a wrong result is reported as such, without a speed, and the
exit status is 1. Results go to FOLDER/kernels_<operation>.json (FOLDER: $OUT, or benchmarks/results) as
cases end, the most telling first. An operation may take its part of the budget, and what others left of
theirs.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks import rehearsing
from benchmarks.kernels import one

GRACE_S = 30.0  # for the case under way when an operation's time is up, and not more


# Cases of each operation that tell most; of a CPU's interpreter, which takes its time.
REHEARSED = {
    "lora": "batch=8",
    "sparse_delta": "batch=8",
    "merged_rows": "bits=4",
    "svd_delta": "batch=8",
    "boft": "adapters=2",
}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.kernels", description="Times variant kernels."
    )
    parser.add_argument(
        "operations", nargs="*", help=f"of {', '.join(one.OPERATIONS)}; all when none is named"
    )
    arguments = one.options(parser).parse_args(argv)
    ends = time.monotonic() + arguments.budget_s
    operations = arguments.operations or one.OPERATIONS
    if unknown := set(operations) - set(one.OPERATIONS):
        parser.error(f"no operation {', '.join(sorted(unknown))}; name them before --where")
    failed = []
    for index, operation in enumerate(operations):
        share = (ends - time.monotonic()) / (len(operations) - index)
        if not _ran(operation, arguments, max(1.0, share - GRACE_S / 2)):
            failed.append(operation)
    print(f"wrong or not done: {', '.join(failed)}" if failed else "all is right")
    return 1 if failed else 0


def _ran(operation: str, arguments: argparse.Namespace, seconds: float) -> bool:
    command = [sys.executable, "-m", "benchmarks.kernels.one", operation, "--out", str(arguments.out)]
    command += ["--budget-s", str(round(seconds))]
    command += ["--check"] if arguments.check else []
    command += ["--where", *arguments.where] if arguments.where else []
    begun = time.monotonic()
    try:
        environment = {**os.environ, **({"TRITON_INTERPRET": "1"} if rehearsing.is_rehearsal() else {})}
        status = subprocess.run(command, env=environment, check=False, timeout=seconds + GRACE_S).returncode
    except subprocess.TimeoutExpired:
        status = -1
        print(f"{operation}: ended; a case takes longer than {GRACE_S:.0f} s", flush=True)
    print(f"{operation}: {time.monotonic() - begun:.0f} s, exit status {status}", flush=True)
    return status == 0


def rehearse(folder: Path) -> None:
    """Every operation on tiny shapes, in Triton's interpreter: each result is checked, and none is timed."""
    for operation in one.OPERATIONS:
        assert main([operation, "--check", "--out", str(folder), "--where", REHEARSED[operation]]) == 0
        rows = rehearsing.check(one.path_of(operation, folder), "rows", "versions")["rows"]
        assert "ostinato" in {row["contender"] for row in rows}
        assert all(row["correct"] and row["us"] is None for row in rows), json.dumps(rows)


if __name__ == "__main__":
    rehearsing.run(main, rehearse)
