"""Draws the kernels' benchmark results: `python -m benchmarks.kernels.plot [FOLDER]`.

Reads FOLDER/kernels_*.json (benchmarks/results unless given) and writes a PNG beside each.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from pathlib import Path

RESULTS = Path(__file__).parents[1] / "results"


def main() -> None:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else RESULTS
    for path in sorted(folder.glob("kernels_*.json")):
        draw(json.loads(path.read_text()), path.with_suffix(".png"))


def draw(record: dict, path: Path) -> None:
    """One panel per shape: microseconds over the batch, a line per contender, and the floor."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    by_shape = _by_shape(record["rows"])
    figure, axes = plt.subplots(1, len(by_shape), figsize=(3.6 * len(by_shape), 3.6), squeeze=False)
    for panel, (shape, lines) in zip(axes[0], by_shape.items(), strict=True):
        for name, points in sorted(lines.items()):
            batches, us = zip(*sorted(points.items()), strict=True)
            style = {"color": "grey", "linestyle": ":"} if name == "floor" else {"marker": "o"}
            panel.plot(batches, us, label=name, **style)
        panel.set(title=shape, xlabel="rows", xscale="log", yscale="log")
        panel.grid(alpha=0.3)
    axes[0][0].set_ylabel("microseconds")
    axes[0][0].legend()
    figure.suptitle(f"{record['operation']} on {record['device']}, 8 variants, rows spread uniformly")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _by_shape(rows: list[dict]) -> dict[str, dict[str, dict[int, float]]]:
    """Microseconds by shape, line and batch, of the cases that every shape has."""
    found: dict[str, dict[str, dict[int, float]]] = defaultdict(lambda: defaultdict(dict))
    for row in rows:
        labels = row["labels"]
        eight = labels.get("adapters") == "8xr16" or labels.get("variants") == 8
        if row["correct"] and eight and labels.get("distribution") == "uniform":
            lines = found[str(labels["shape"])]
            lines[row["contender"]][labels["batch"]] = row["us"]
            lines["floor"][labels["batch"]] = row["floor_us"]
    return found


if __name__ == "__main__":
    main()
