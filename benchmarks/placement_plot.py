"""The plot of `benchmarks.placement`: gaps to the optimum, seconds of a decision, models that fit."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def plot(result: dict[str, Any], path: Path) -> None:
    """Of the parts that `result` has."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(16, 5))
    for name, found in result.get("gaps", {}).get("policies", {}).items():
        values = [100 * gap for gap in found["gaps"]]
        shares = [(n + 1) / len(values) for n in range(len(values))]
        left.step(values, shares, where="post", label=f"{name}: mean {100 * found['mean']:.2g}%")
    left.set(
        xlabel="above the optimum (%)", ylabel="share of instances", title="small instances", xlim=(-2, 200)
    )
    if result.get("gaps"):
        left.legend(fontsize=8)
    rows = result.get("scale", [])
    for policy, cluster in sorted({(row["policy"], row["cluster"]) for row in rows}):
        line = [row for row in rows if (row["policy"], row["cluster"]) == (policy, cluster)]
        sizes = [row["gpus"] for row in line]
        middle.loglog(sizes, [row["max_cpu_s"] for row in line], marker="o", label=f"{policy}, {cluster}")
    middle.plot([1000], [1], "k*")
    middle.plot([10000], [10], "k*", label="aims")
    middle.set(xlabel="GPUs", ylabel="CPU s, slowest of 8 decisions", title="one decision")
    middle.legend(fontsize=8)
    bars = [row for row in result.get("paper", []) if row.get("goal", "minLat") == "minLat"]
    names = [f"{row['policy']}, {'compressed' if len(row['forms']) > 1 else 'fp16'}" for row in bars]
    right.barh(names, [row["fit"] for row in bars])
    right.invert_yaxis()
    right.tick_params(axis="y", labelsize=7)
    right.set(xlabel="of 21 models on 8 x 48 GB, minLat, simulated", title="models that fit")
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)
