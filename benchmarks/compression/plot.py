"""Draws what `benchmarks.compression.quality` found: accuracy against size, a panel for each task.

    python -m benchmarks.compression.plot QUALITY.json [QUALITY.json ...]

Writes QUALITY.png next to the first file; several files are read as one. Sizes are without embedding and
head, which every method leaves unchanged. A point is the mean of a method's seeds; a bar goes from the worst
to the best of several seeds. Markers are hollow, so that points in one place are all visible.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks import plot_style, rehearsing
from benchmarks.compression.labels import BASE, BASE_SHOWN, BUNDLED, FINETUNE, LORA, REFERENCES

MARKERS = "osD^v<>PX*hd"
COLUMNS = 3
LINES = {FINETUNE: "-", BASE: ":", BASE_SHOWN: "--"}


def main(argv: Sequence[str] | None = None) -> None:
    files = [Path(name) for name in (sys.argv[1:] if argv is None else argv)]
    records = [json.loads(file.read_text()) for file in files]
    draw(
        [row for record in records for row in record["rows"]],
        files[0].with_suffix(".png"),
        records[0]["base"],
    )


def draw(rows: Iterable[dict[str, Any]], target: Path, base: str) -> None:
    by_task: dict[str, dict[str, list[dict[str, Any]]]] = defaultdict(lambda: defaultdict(list))
    seeds = set()
    for row in rows:
        seeds.add(row["seed"])
        if (label := _label(row)) is not None:
            by_task[row["task"]][label].append(row)
    names = list(dict.fromkeys(name for methods in by_task.values() for name in methods))
    points = [name for name in names if name not in REFERENCES]
    style = {name: (f"C{i % 10}", MARKERS[i % len(MARKERS)]) for i, name in enumerate(points)}
    columns = min(len(by_task), COLUMNS)
    figure, axes = plot_style.new(-(-len(by_task) // columns), columns, (4.2, 3.8))
    for panel, (task, methods) in zip(axes.flat, by_task.items(), strict=False):
        for name, found in methods.items():
            if name in REFERENCES:
                _line(panel, name, found)
            else:
                _point(panel, name, found, style[name])
        panel.set(
            title=task, xlabel="MB without embedding and head", ylabel="exact answers (%)", xscale="log"
        )
        plot_style.plain_log(panel.xaxis)
        panel.grid(alpha=0.3)
    for panel in axes.flat[len(by_task) :]:
        panel.axis("off")
    plot_style.legend(figure, axes, names)
    figure.suptitle(f"Compressed fine-tunes of {base}, {len(seeds)} seed{'s' * (len(seeds) > 1)}")
    plot_style.save(figure, target)


def _label(row: dict[str, Any]) -> str | None:
    """What a row is drawn as; None: an ablation, which tables show."""
    method: str = row["method"]
    is_variation = method.startswith("deltamix") and " " in method and not row["adapter"]
    if row["calibration"] == BUNDLED or is_variation:
        return None
    return f"{method} of LoRA" if row["adapter"] and method != LORA else method


def _line(panel: Any, name: str, rows: Sequence[dict[str, Any]]) -> None:
    level = 100 * sum(row["accuracy"] for row in rows) / len(rows)
    colour = "black" if name == FINETUNE else "grey"
    panel.axhline(level, label=name, zorder=1, color=colour, linestyle=LINES[name])


def _point(panel: Any, name: str, rows: Sequence[dict[str, Any]], style: tuple[str, str]) -> None:
    accuracies = [100 * row["accuracy"] for row in rows]
    size = sum(row["size_bytes"] - row.get("table_bytes", 0) for row in rows) / len(rows) / 1e6
    mean = sum(accuracies) / len(accuracies)
    spread = [[mean - min(accuracies)], [max(accuracies) - mean]] if len(rows) > 1 else None
    colour, marker = style
    panel.errorbar(
        [size],
        [mean],
        yerr=spread,
        label=name,
        color=colour,
        marker=marker,
        linestyle="",
        capsize=3,
        fillstyle="none",
        markersize=9,
        markeredgewidth=1.8,
        zorder=3,
    )


def rehearse(folder: Path) -> None:
    """Invented rows of two tasks."""
    common = {"calibration": "task", "adapter": None}
    rows: list[dict[str, Any]] = []
    for task in ("cipher", "facts-20"):
        rows += [{**common, "seed": 0, "task": task, "method": name, "accuracy": 0.9} for name in REFERENCES]
        for seed, size in ((0, 10**7), (1, 10**7), (0, 10**8)):
            method = f"method-{size}"
            row = {
                "task": task,
                "seed": seed,
                "method": method,
                "accuracy": 0.5 + 0.1 * seed,
                "size_bytes": size,
            }
            rows.append({**common, **row})
    path = folder / "quality.json"
    rehearsing.write_result(path, {"base": "tiny", "rows": rows})
    main([str(path)])
    assert path.with_suffix(".png").stat().st_size > 1000


if __name__ == "__main__":
    rehearsing.run(main, rehearse)
