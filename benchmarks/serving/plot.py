"""Draws what `benchmarks.serving` measured: times and throughput against the rate of requests.

    python -m benchmarks.serving.plot RESULT.json [RESULT.json ...]

Writes RESULT.png next to the first file; several files are read as one.
"""

from __future__ import annotations

import json
import shutil
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import plot_style, rehearsing
from benchmarks.serving.workload import parse_case

NAMES = {
    "ours": "ours, N={}",
    "baseline": "whole models, {} on the GPU",
    "baseline-disk": "whole models, {} on the GPU, most on disk",
}
PANELS = (
    ("e2e_mean_s", "mean E2E (s)", "log"),
    ("ttft_mean_s", "mean TTFT (s)", "log"),
    ("requests_per_s", "finished requests per s", "linear"),
)
TITLES = {"zipf": "Zipf-1.5", "uniform": "uniform", "azure": "DeltaZip's Azure traces"}
COLOURS = {"ours": "tab:blue", "baseline": "tab:red", "baseline-disk": "tab:orange"}


def lines(rows: Sequence[dict[str, Any]], kind: str) -> dict[tuple[str, int], list[dict[str, Any]]]:
    """The measured Poisson cases of one kind, of all seeds, by engine and how many variants may run; ordered
    by rate. The last row of a case that was measured again counts."""
    found: dict[tuple[str, int], list[dict[str, Any]]] = {}
    last = {(row["engine"], row["limit"], row["case"]): row for row in rows if "requests" in row}
    for row in last.values():
        case = parse_case(row["case"])
        if case.kind != kind or case.cv != 1:
            continue
        point = {**row, "rate": case.rate}
        found.setdefault((row["engine"], row["limit"]), []).append(point)
    return {key: sorted(points, key=lambda point: point["rate"]) for key, points in found.items()}


def draw(rows: Sequence[dict[str, Any]], target: Path) -> None:
    by_kind = {kind: found for kind in TITLES if (found := lines(rows, kind))}
    limits = sorted({limit for found in by_kind.values() for _, limit in found})
    figure, grid = plot_style.new(len(PANELS), len(by_kind), (4.2, 3.2), sharex="col")
    for column, (kind, found) in enumerate(by_kind.items()):
        for row, (name, label, scale) in enumerate(PANELS):
            axes = grid[row][column]
            for (engine, limit), points in sorted(found.items()):
                what = NAMES[engine].format(limit)
                rates = list(dict.fromkeys(p["rate"] for p in points))
                axes.plot(
                    rates,
                    [statistics.fmean(p[name] for p in points if p["rate"] == rate) for rate in rates],
                    marker="os^v"[limits.index(limit) % 4],
                    color=COLOURS[engine],
                    label=what,
                )
            axes.set(yscale=scale, ylabel=label if not column else "")
            if scale == "log":
                plot_style.plain_log(axes.yaxis)
            axes.grid(alpha=0.3)
        grid[0][column].set_title(TITLES[kind])
        grid[-1][column].set_xlabel("requests per s")
    plot_style.legend(figure, grid)
    plot_style.save(figure, target)


def main(argv: Sequence[str] | None = None) -> None:
    files = [Path(name) for name in (sys.argv[1:] if argv is None else argv)]
    rows = [row for file in files for row in json.loads(file.read_text())["rows"]]
    draw(rows, files[0].with_suffix(".png"))


def rehearse(folder: Path) -> None:
    """What is committed."""
    copied = Path(shutil.copy(rehearsing.RESULTS / "serving.json", folder))
    main([str(copied)])
    assert copied.with_suffix(".png").stat().st_size > 1000


if __name__ == "__main__":
    rehearsing.run(main, rehearse)
