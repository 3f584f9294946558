"""Times the variant kernels on a CUDA device.

    python -m benchmarks.kernels [OPERATION ...] [--where KEY=VALUE[,VALUE] ...] [--out FOLDER]

Every case is checked before it is timed; a wrong result is reported as such, without a speed, and the
exit status is 1. Results go to FOLDER/kernels_<operation>.json (FOLDER: $OUT, or benchmarks/results).
`python -m benchmarks.kernels.plot` draws them.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import os
import platform
import sys
import time
from pathlib import Path

import torch

from benchmarks.kernels import harness

OPERATIONS = ("lora", "svd_delta", "sparse_delta", "boft")
RESULTS = Path(__file__).parents[1] / "results"


def main() -> int:
    arguments = _arguments()
    if not torch.cuda.is_available():
        raise SystemExit("no CUDA device: kernels are timed on one")
    device = torch.device("cuda")
    rates = harness.measure_rates(device)
    print(f"copy {rates.copy_bytes_per_s / 1e12:.2f} TB/s, bf16 {rates.flops_per_s / 1e12:.0f} TFLOP/s")
    wrong = 0
    for operation in arguments.operations or OPERATIONS:
        module = _module(operation)
        if module is None:
            continue
        started = time.monotonic()
        rows = []
        for case in harness.selected(module.cases(), arguments.where):
            for measured in harness.measure(case, rates, device):
                wrong += not measured.correct
                rows.append(measured)
                print(_line(operation, case, measured), flush=True)
        _write(arguments.out / f"kernels_{operation}.json", operation, rates, rows)
        print(f"{operation}: {len(rows)} measurements in {time.monotonic() - started:.0f} s")
    return 1 if wrong else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.kernels", description="Times variant kernels."
    )
    parser.add_argument("operations", nargs="*", help=f"of {', '.join(OPERATIONS)}; all when none is named")
    parser.add_argument("--where", nargs="*", default=[], help="key=value[,value]: only cases so labelled")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", RESULTS)))
    return parser.parse_args()


def _module(operation: str):
    name = f"benchmarks.kernels.{operation}"
    if importlib.util.find_spec(name) is None:
        print(f"{operation}: no benchmark yet")
        return None
    return importlib.import_module(name)


def _line(operation: str, case: harness.Case, measured: harness.Measurement) -> str:
    head = f"{operation} {case} {measured.contender}:"
    if not measured.correct:
        return f"{head} WRONG, error {measured.error:.2e}; not timed"
    return (
        f"{head} {measured.us:.1f} us, {measured.bytes_moved / 1e6:.2f} MB, {measured.tb_per_s:.2f} TB/s"
        f" ({measured.percent_of_copy:.0f}% of copy, {measured.percent_of_floor:.0f}% of floor),"
        f" error {measured.error:.1e}"
    )


def _write(path: Path, operation: str, rates: harness.Rates, rows: list[harness.Measurement]) -> None:
    record = {
        "operation": operation,
        "command": "python -m benchmarks.kernels " + " ".join(sys.argv[1:]),
        "device": torch.cuda.get_device_name(),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "triton": importlib.import_module("triton").__version__,
        },
        "copy_tb_per_s": rates.copy_bytes_per_s / 1e12,
        "bf16_tflop_per_s": rates.flops_per_s / 1e12,
        "rows": [row.as_dict() for row in rows],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    raise SystemExit(main())
