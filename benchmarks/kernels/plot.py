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
    for path in sorted(set(folder.glob("kernels_*.json")) - set(folder.glob("*_tuning.json"))):
        draw(json.loads(path.read_text()), path.with_suffix(".png"))
        print(path.with_suffix(".png"))


def draw(record: dict, path: Path) -> None:
    """One panel per shape: microseconds over the rows, a line per contender, and the floors."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    by_shape = _by_shape(record["rows"])
    if not by_shape:
        return
    figure, axes = plt.subplots(1, len(by_shape), figsize=(3.6 * len(by_shape), 3.6), squeeze=False)
    for panel, (shape, lines) in zip(axes[0], by_shape.items(), strict=True):
        for name, points in sorted(lines.items()):
            batches, us = zip(*sorted(points.items()), strict=True)
            style = {"color": "grey", "linestyle": ":"} if name.startswith("floor") else {"marker": "o"}
            panel.plot(batches, us, label=name, **style)
        panel.set(title=shape, xlabel="rows", xscale="log", yscale="log")
        panel.grid(alpha=0.3)
    axes[0][0].set_ylabel("microseconds")
    axes[0][0].legend()
    variants = "a row for each" if record["operation"] == "boft" else "8 variants"
    figure.suptitle(f"{record['operation']} on {record['device']}, {variants}")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _by_shape(rows: list[dict]) -> dict[str, dict[str, dict[int, float]]]:
    """Microseconds by panel, line and number of rows, of the cases that every shape has."""
    found: dict[str, dict[str, dict[int, float]]] = defaultdict(lambda: defaultdict(dict))
    for row in rows:
        labels = row["labels"]
        place = _place(labels)
        if row["us"] is None or place is None:
            continue
        panel, line, count = place
        lines = found[panel]
        lines[f"{row['contender']}{line}"][count] = row["us"]
        lines[f"floor{line}"][count] = row["floor_us"]
    return found


def _place(labels: dict) -> tuple[str, str, int] | None:
    """A case's panel, what is added to its line's name, and how many rows it has; None: not drawn."""
    shape = str(labels["shape"])
    if "work" in labels:  # BOFT, a row for each adapter
        return shape, f" {labels['work']} {labels.get('kind', '')}", int(labels["adapters"])
    eight = labels.get("adapters") == "8xr16" or labels.get("variants") == 8
    # Every shape is timed with either one or the other.
    spread = "distinct" if "bits" in labels else "uniform"
    if not eight or labels.get("distribution") != spread:
        return None
    return shape, f" {labels['bits']} bits" if "bits" in labels else "", int(labels["batch"])


if __name__ == "__main__":
    main()
