"""Prints results of this package as tables in Markdown.

    python -m benchmarks.compression.tables FILE [FILE ...]

FILEs are what `train`, `quality` and `speed` wrote, in any order; several of a kind are read as one.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks import rehearsing
from benchmarks.compression.labels import BASE_SHOWN, BUNDLED, LORA

Row = dict[str, Any]


def main(argv: Sequence[str] | None = None) -> None:
    records = [json.loads(Path(name).read_text()) for name in (sys.argv[1:] if argv is None else argv)]
    rows = [row for record in records for row in record["rows"]]
    for table in (trained(rows), accuracies(rows), errors(rows), costs(rows), times(rows)):
        if len(table) > 2:
            print("\n".join(table), end="\n\n")


def trained(rows: Sequence[Row]) -> list[str]:
    """Full fine-tuning compared with LoRA, by task."""
    runs = [row for row in rows if "batch_tokens" in row]
    tasks = list(dict.fromkeys(row["task"] for row in runs))
    kinds = sorted({_kind(row) for row in runs})
    lines = _head(["task", "tokens", "steps", *kinds])
    for task in tasks:
        mine = [row for row in runs if row["task"] == task]
        cells = [_percent([r["accuracy"] for r in mine if _kind(r) == kind]) for kind in kinds]
        lines.append(_line([task, f"{mine[0]['tokens'] / 1e6:g} M", str(mine[0]["steps"]), *cells]))
    return lines


def _kind(row: Row) -> str:
    return "all weights" if row["rank"] is None else f"LoRA r{row['rank']}, {row['lr']:g}"


def accuracies(rows: Sequence[Row]) -> list[str]:
    """Exact answers in percent and KL in nats, a line for each method and two columns for each task."""
    cells = [row for row in rows if "calibration" in row]
    tasks = list(dict.fromkeys(row["task"] for row in cells))
    lines = _head(["method", *(f"{task}: {what}" for task in tasks for what in ("exact (%)", "KL"))])
    for name, mine in _by(cells, label).items():
        found = []
        for task in tasks:
            of_task = [row for row in mine if row["task"] == task]
            kls = [row["kl"] for row in of_task if "kl" in row and row["method"] != BASE_SHOWN]
            found += [_percent([row["accuracy"] for row in of_task]), f"{_mean(kls):.3g}" if kls else "-"]
        lines.append(_line([name, *found]))
    return lines


def errors(rows: Sequence[Row]) -> list[str]:
    """Layer errors by task, for tasks differ in them more than methods do."""
    cells = [row for row in rows if row.get("layer_error") is not None]
    tasks = list(dict.fromkeys(row["task"] for row in cells))
    lines = _head(["layer error", *tasks])
    for name, mine in _by(cells, label).items():
        of_tasks = [[row for row in mine if row["task"] == task] for task in tasks]
        lines.append(
            _line([name, *(_cell(found, "layer_error", lambda v: f"{v:.4f}") for found in of_tasks)])
        )
    return lines


def costs(rows: Sequence[Row]) -> list[str]:
    """Sizes, ratios and times, as means over tasks and seeds."""
    cells = [row for row in rows if "calibration" in row and "size_bytes" in row]
    lines = _head(["method", "MB", "ratio", "without embedding", "s"])
    for name, mine in _by(cells, label).items():
        values = [
            _cell(mine, "size_bytes", lambda value: f"{value / 1e6:.1f}"),
            _cell(mine, "ratio", lambda value: f"{value:.2f}"),
            _cell(mine, "ratio_without_tables", lambda value: f"{value:.2f}"),
            _cell(mine, "compress_s", lambda value: f"{value:.0f}"),
        ]
        lines.append(_line([name, *values]))
    return lines


def times(rows: Sequence[Row]) -> list[str]:
    """The shapes of layers of a large model."""
    measured = [row for row in rows if row.get("model_s") is not None and "layers" in row]
    shapes = (
        [f"{out} x {into}: s" for out, into in (layer["shape"] for layer in measured[0]["layers"])]
        if measured
        else []
    )
    lines = _head(["method", *shapes, "model: min", "peak: GB"])
    for row in measured:
        seconds = [f"{layer['s']:.2f}" for layer in row["layers"]]
        peak = f"{row['peak_bytes'] / 1e9:.1f}"
        lines.append(_line([row["method"], *seconds, f"{row['model_s'] / 60:.1f}", peak]))
    return lines


def label(row: Row) -> str:
    """A method as it was used."""
    of_lora = " of LoRA" if row["adapter"] and row["method"] != LORA else ""
    return f"{row['method']}{of_lora}{', bundled text' if row['calibration'] == BUNDLED else ''}"


def _by(rows: Iterable[Row], key: Callable[[Row], str]) -> dict[str, list[Row]]:
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(key(row), []).append(row)
    return found


def _cell(rows: Sequence[Row], name: str, show: Callable[[float], str]) -> str:
    values = [row[name] for row in rows if row.get(name) is not None]
    return show(_mean(values)) if values else "-"


def _mean(values: Sequence[float]) -> float:
    return statistics.fmean(values)


def _percent(shares: Sequence[float]) -> str:
    """The mean, and of several its standard deviation."""
    if not shares:
        return "-"
    mean = 100 * _mean(shares)
    return f"{mean:.1f}" if len(shares) == 1 else f"{mean:.1f} ± {100 * statistics.stdev(shares):.1f}"


def _head(names: Sequence[str]) -> list[str]:
    return [_line(names), "|" + "---|" * len(names)]


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def rehearse(folder: Path) -> None:
    """Invented rows."""
    cell = {"task": "cipher", "method": "some", "calibration": "task", "adapter": None, "size_bytes": 2e6}
    rows = [{**cell, "accuracy": share, "kl": 0.5} for share in (0.5, 0.7)]
    assert accuracies(rows)[-1] == "| some | 60.0 ± 14.1 | 0.5 |"
    assert errors([{**row, "layer_error": 0.25} for row in rows])[-1] == "| some | 0.2500 |"
    assert costs(rows)[-1] == "| some | 2.0 | - | - | - |"
    path = folder / "quality.json"
    rehearsing.write_result(path, {"rows": rows})
    main([str(path)])


if __name__ == "__main__":
    rehearsing.run(main, rehearse)
