"""The plot of `benchmarks.placement`: gaps to the optimum, seconds of a decision, models that fit.

    python -m benchmarks.placement_plot [RESULT.json]

Writes RESULT.png next to benchmarks/results/placement.json, or the file given.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import plot_style, rehearsing

MAX_GAP = 200  # percent; what is beyond is not drawn
AIMS = ((1_000, 100), (10_000, 500), (100_000, 5_000))  # GPUs, milliseconds


def plot(result: dict[str, Any], path: Path) -> None:
    """Plots of the parts that `result` has."""
    figure, axes = plot_style.new(1, 3, (6.2, 6.8), width_ratios=(1, 1, 0.8))
    left, middle, right = axes[0]
    _gaps(left, result.get("gaps", {}).get("policies", {}))
    _scale(middle, result.get("scale", []))
    _paper(right, result.get("paper", []))
    plot_style.save(figure, path)


def _gaps(axes: Any, policies: dict[str, dict[str, Any]]) -> None:
    for name, found in policies.items():
        values = [100 * gap for gap in found["gaps"]]
        shares = [100 * (n + 1) / len(values) for n in range(len(values))]
        axes.step(values, shares, where="post", label=f"{name}: mean {100 * found['mean']:.2g}%")
    axes.set(xlabel="above the optimum (%)", ylabel="instances so near (%)", title="small instances")
    axes.set(xlim=(-2, MAX_GAP), ylim=(0, 102))
    axes.grid(alpha=0.3)
    if policies:
        plot_style.below(axes)


def _scale(axes: Any, rows: list[dict[str, Any]]) -> None:
    for policy, cluster in sorted({(row["policy"], row["cluster"]) for row in rows}):
        line = [row for row in rows if (row["policy"], row["cluster"]) == (policy, cluster)]
        sizes, slowest = [row["gpus"] for row in line], [1e3 * row["max_cpu_s"] for row in line]
        axes.loglog(sizes, slowest, marker="o", label=f"{policy}, {cluster}")
    axes.plot(*zip(*AIMS, strict=True), "k*", markersize=10, label="aims")
    axes.set(xlabel="GPUs", ylabel="CPU time, slowest decision (ms)", title="one decision")
    plot_style.plain_log(axes.xaxis, sorted({row["gpus"] for row in rows} | {gpus for gpus, _ in AIMS}))
    plot_style.plain_log(axes.yaxis)
    axes.grid(alpha=0.3)
    plot_style.below(axes)


def _paper(axes: Any, rows: list[dict[str, Any]]) -> None:
    from matplotlib.ticker import MultipleLocator

    bars = [row for row in rows if row.get("goal", "minLat") == "minLat"]
    names = [f"{row['policy']}, {'compressed' if len(row['forms']) > 1 else 'fp16'}" for row in bars]
    drawn = axes.barh(names, [row["fit"] for row in bars])
    axes.bar_label(drawn, padding=3)
    axes.invert_yaxis()
    axes.margins(x=0.12)
    axes.xaxis.set_major_locator(MultipleLocator(5))
    axes.set(xlabel="models, of 21 on 8 x 48 GB (minLat, simulated)", title="models that fit")


def main(argv: Sequence[str] | None = None) -> None:
    arguments = sys.argv[1:] if argv is None else argv
    path = Path(arguments[0]) if arguments else rehearsing.RESULTS / "placement.json"
    plot(json.loads(path.read_text()), path.with_suffix(".png"))


def rehearse(folder: Path) -> None:
    """What is committed."""
    copied = Path(shutil.copy(rehearsing.RESULTS / "placement.json", folder))
    main([str(copied)])
    assert copied.with_suffix(".png").stat().st_size > 1000


if __name__ == "__main__":
    rehearsing.run(main, rehearse)
