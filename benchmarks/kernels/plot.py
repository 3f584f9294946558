"""Draws the kernels' benchmark results: `python -m benchmarks.kernels.plot [FOLDER]`.

Reads FOLDER/kernels_*.json (benchmarks/results unless given) and writes a PNG next to each.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import plot_style, rehearsing

COLUMNS = 4
# The variants of a case's rows, if not eight.
OF = {"boft": "a row for each", "merged_rows": "one variant, with the base's product"}


def main(argv: Sequence[str] | None = None) -> None:
    arguments = sys.argv[1:] if argv is None else argv
    folder = Path(arguments[0]) if arguments else rehearsing.RESULTS
    for path in sorted(set(folder.glob("kernels_*.json")) - set(folder.glob("*_tuning.json"))):
        draw(json.loads(path.read_text()), path.with_suffix(".png"))
        print(path.with_suffix(".png"))


def draw(record: dict[str, Any], path: Path) -> None:
    """One panel per shape: microseconds over the rows, a line per contender, and the floors."""
    by_shape = _by_shape(record["rows"])
    if not by_shape:
        return
    columns = min(len(by_shape), COLUMNS)
    rows = -(-len(by_shape) // columns)
    figure, axes = plot_style.new(rows, columns, (4.0, 3.6))
    names = sorted({name for lines in by_shape.values() for name in lines}, key=_order)
    colours = {name: f"C{i}" for i, name in enumerate(n for n in names if not n.startswith("floor"))}
    for panel, (shape, lines) in zip(axes.flat, by_shape.items(), strict=False):
        for name in (name for name in names if name in lines):
            batches, us = zip(*sorted(lines[name].items()), strict=True)
            panel.plot(batches, us, label=name, **_style(name, colours))
        panel.set(title=shape, xlabel="rows", ylabel="time (µs)", xscale="log", yscale="log")
        plot_style.plain_log(panel.xaxis, sorted({count for points in lines.values() for count in points}))
        plot_style.plain_log(panel.yaxis)
        panel.grid(alpha=0.3)
    for panel in axes.flat[len(by_shape) :]:
        panel.axis("off")
    plot_style.legend(figure, axes, names)
    variants = OF.get(record["operation"], "8 variants")
    figure.suptitle(f"{record['operation']} on {record['device']}, {variants}")
    plot_style.save(figure, path)


def _order(name: str) -> tuple[bool, bool, str]:
    """Ours first, floors last."""
    return name.startswith("floor"), not name.startswith("ostinato"), name


def _style(name: str, colours: dict[str, str]) -> dict[str, str]:
    """A floor's line has its own form, and the colour of our kernel with the same work."""
    if not name.startswith("floor"):
        return {"color": colours[name], "marker": "o"}
    ours = colours.get(f"ostinato{name.removeprefix('floor')}", "grey")
    return {"color": ours if name != "floor" else "grey", "linestyle": ":"}


def _by_shape(rows: list[dict[str, Any]]) -> dict[str, dict[str, dict[int, float]]]:
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


def _place(labels: dict[str, Any]) -> tuple[str, str, int] | None:
    """A case's panel, what is added to its line's name, and how many rows it has; None: not drawn."""
    shape = str(labels["shape"])
    if "work" in labels:  # BOFT, a row for each adapter
        return shape, f" {labels['work']} {labels.get('kind', '')}", int(labels["adapters"])
    if "rows" in labels:  # of the base, and of each variant
        return (shape, "", int(labels["rows"])) if str(labels["rows"]).isdigit() else None
    eight = labels.get("adapters") == "8xr16" or labels.get("variants") == 8
    # Every shape is timed with either one or the other.
    spread = "distinct" if "bits" in labels else "uniform"
    if not eight or labels.get("distribution") != spread:
        return None
    return shape, f" {labels['bits']} bits" if "bits" in labels else "", int(labels["batch"])


def rehearse(folder: Path) -> None:
    """What is committed of every operation."""
    for path in rehearsing.RESULTS.glob("kernels_*.json"):
        shutil.copy(path, folder)
    main([str(folder)])
    drawn = {path.stem for path in folder.glob("*.png")}
    assert drawn == {path.stem for path in folder.glob("*.json") if not path.stem.endswith("_tuning")}


if __name__ == "__main__":
    rehearsing.run(main, rehearse)
