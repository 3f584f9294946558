"""A figure of a paper again, by simulation.

    python -m benchmarks.reproduction FIGURE [FIGURE ...] --out RESULT.json [--data FOLDER] [--seeds N]

Figures: maveriq-8, maveriq-10 to maveriq-14, deltazip-11-13 (throughput, latency and SLOs of the same
runs), deltazip-19, deltazip-measured (the simulation beside what was measured), deltazip-promises (the
highest rates that keep a promise, with today's costs); `maveriq` and `deltazip` are
all of a paper's. `--data` holds Azure's LLM inference traces of 2023 (`AzureLLMInferenceTrace_code.csv` and
`_conv.csv`) and DeltaZip's `deltazip-azure-ar0.5.jsonl` and `-ar1.0.jsonl`;
benchmarks/results/reproduction.md names their sources. Results of other figures in RESULT.json stay.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks import rehearsing
from benchmarks.reproduction import (
    deltazip,
    deltazip_measured,
    maveriq,
    maveriq_loads,
    plots,
    promises,
    small_data,
)
from benchmarks.reproduction.sizes import Size

Figure = Callable[[Path, Size], list[dict[str, Any]]]
FIGURES: dict[str, Figure] = {
    "maveriq-8": maveriq_loads.figure_8,
    "maveriq-10": maveriq.figure_10,
    "maveriq-11": maveriq.figure_11,
    "maveriq-12": maveriq.figure_12,
    "maveriq-13": maveriq.figure_13,
    "maveriq-14": maveriq.figure_14,
    "deltazip-11-13": deltazip.figures_11_to_13,
    "deltazip-19": deltazip.figure_19,
    "deltazip-measured": deltazip_measured.held_against_measurements,
    "deltazip-promises": promises.promises,
}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("figures", nargs="+", choices=[*FIGURES, "maveriq", "deltazip"])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--data", type=Path, default=Path("traces"))
    parser.add_argument("--seeds", type=int, default=3)
    asked = parser.parse_args(argv)
    names = [name for name in FIGURES if any(name.startswith(one) for one in asked.figures)]
    compute(names, asked.data, asked.out, Size(seeds=asked.seeds))


def compute(names: Sequence[str], data: Path, out: Path, size: Size) -> None:
    result = json.loads(out.read_text()) if out.exists() else {}
    result["host"] = {"cores": len(os.sched_getaffinity(0)), "python": platform.python_version()}
    result.setdefault("figures", {})
    for name in names:
        began = time.process_time()
        command = f"python -m benchmarks.reproduction {name} --out benchmarks/results/{out.name} --data DATA"
        rows = FIGURES[name](data, size)
        result["figures"][name] = {
            "command": f"{command} --seeds {size.seeds}",
            "cpu_s": round(time.process_time() - began, 1),
            "rows": rows,
        }
        rehearsing.write_result(out, result)
    plots.draw(result, out)


def rehearse(folder: Path) -> None:
    """Every figure of minute traces: one seed, one rate, few models, a few seconds."""
    data = small_data.write(folder)
    small = Size(shares=(0.4,), seeds=1, models=3, horizon_s=20.0, rates=(1.0,), promise_rates=(1.0,))
    for paper in ("maveriq", "deltazip"):
        out = folder / f"reproduction_{paper}.json"
        compute([name for name in FIGURES if name.startswith(paper)], data, out, small)
        found = rehearsing.check(out, "figures")["figures"]
        assert all(found[name]["rows"] for name in FIGURES if name.startswith(paper))
        assert all(path.stat().st_size > 1000 for path in folder.glob(f"reproduction_{paper}*.png"))


if __name__ == "__main__":
    rehearsing.run(main, rehearse)
