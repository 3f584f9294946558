"""Times one operation in this process: `python -m benchmarks.kernels.one OPERATION [OPTION ...]`.

Results are written case by case: ending this process loses only the case under way.
"""

from __future__ import annotations

import argparse
import importlib
import os
import platform
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmarks import rehearsing
from benchmarks.kernels import harness

REHEARSED_BY = "benchmarks.kernels"
OPERATIONS = ("lora", "sparse_delta", "merged_rows", "boft", "svd_delta")


def options(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Those of one operation's process and of all operations' alike."""
    parser.add_argument("--where", nargs="*", default=[], help="key=value[,value]: only cases so labelled")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", rehearsing.RESULTS)))
    parser.add_argument("--budget-s", type=float, default=600, help="no case begins later")
    parser.add_argument(
        "--check", action="store_true", help="tiny shapes, not timed; runs on a CPU if TRITON_INTERPRET=1"
    )
    return parser


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kernels.one", description=__doc__)
    parser.add_argument("operation", choices=OPERATIONS)
    arguments = options(parser).parse_args()
    ends = time.monotonic() + arguments.budget_s
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    rates = None if arguments.check else harness.measure_rates(device)
    if arguments.check:
        harness.MAX_COPIES = 2
    cases = _cases(arguments)
    rows: list[harness.Measurement] = []
    done = 0
    for case in cases:
        if time.monotonic() > ends:
            break
        measured = _measured(case, rates, device)
        rows += measured
        done += 1
        for row in measured:
            print(_line(arguments.operation, case, row), flush=True)
        _write(arguments, rates, rows, len(cases) - done)
    print(f"{arguments.operation}: {done} of {len(cases)} cases", flush=True)
    return 0 if all(row.correct for row in rows) else 1


def _cases(arguments: argparse.Namespace) -> list[harness.Case]:
    module = importlib.import_module(f"benchmarks.kernels.{arguments.operation}")
    listed = module.cases(harness.TINY) if arguments.check else module.cases()
    return harness.selected(listed, arguments.where)


def _measured(
    case: harness.Case, rates: harness.Rates | None, device: torch.device
) -> list[harness.Measurement]:
    """A case that cannot be prepared or timed is not right; others are measured all the same."""
    try:
        return harness.measure(case, rates, device)
    except Exception as error:
        print(f"{case}: {type(error).__name__}: {str(error)[:500]}", flush=True)
        return [harness.Measurement(case.labels, "failed", float("inf"), correct=False)]


def _line(operation: str, case: harness.Case, measured: harness.Measurement) -> str:
    head = f"{operation} {case} {measured.contender}:"
    if not measured.correct:
        return f"{head} WRONG, error {measured.error:.2e}; not timed"
    if measured.us is None:
        return f"{head} right, error {measured.error:.1e}"
    return (
        f"{head} {measured.us:.1f} us, {measured.bytes_moved / 1e6:.2f} MB, {measured.tb_per_s:.2f} TB/s"
        f" ({measured.percent_of_copy:.0f}% of copy, {measured.percent_of_floor:.0f}% of floor),"
        f" error {measured.error:.1e}"
    )


def _write(
    arguments: argparse.Namespace,
    rates: harness.Rates | None,
    rows: list[harness.Measurement],
    left: int,
) -> None:
    if rates is None and not rehearsing.is_rehearsal():
        return
    record: dict[str, Any] = {
        "operation": arguments.operation,
        "command": "python -m benchmarks.kernels.one " + " ".join(sys.argv[1:]),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "triton": importlib.import_module("triton").__version__,
        },
        "copy_tb_per_s": rates and rates.copy_bytes_per_s / 1e12,
        "bf16_tflop_per_s": rates and rates.flops_per_s / 1e12,
        "cases_left": left,
        "rows": [asdict(row) for row in rows],
    }
    arguments.out.mkdir(parents=True, exist_ok=True)
    rehearsing.write_result(path_of(arguments.operation, arguments.out), record)


def path_of(operation: str, folder: Path) -> Path:
    return folder / f"kernels_{operation}.json"


if __name__ == "__main__":
    raise SystemExit(main())
