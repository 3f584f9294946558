"""What became of the requests over time, a panel for each class, and the memory of the largest processes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import plot_style

COLOURS = {
    "answered in time": "#2a7f62",
    "answered late": "#a8d5a2",
    "refused": "#e0a030",
    "dropped": "#b06030",
    "failed": "#a02040",
    "lost": "#000000",
}
BINS = 60


def draw(result: dict[str, Any], path: Path) -> None:
    """From what was written: `over_time`, `memory` and `killed`."""
    names = [row["class"] for row in result["classes"]]
    figure, axes = plot_style.new(len(names) + 1, 1, (8.0, 2.4), sharex=True)
    for panel, name in zip(axes[:, 0], names, strict=False):
        _outcomes(panel, result["over_time"], name)
    _memory(axes[-1, 0], result["memory"])
    for panel in axes[:, 0]:
        if result["killed"]:
            panel.axvline(result["killed"]["killed_s"], color="black", linestyle=":", label="engine killed")
    axes[-1, 0].set_xlabel("seconds")
    heading = f"{result['factor']:g} times the capacity of {result['capacity_per_s']:g} requests/s"
    axes[0, 0].set_title(f"{heading}\n{axes[0, 0].get_title()}")
    plot_style.legend(figure, axes)
    plot_style.save(figure, path)


def over_time(kinds: Sequence[tuple[float, str, str]], seconds: float) -> dict[str, Any]:
    """Requests a second by class and what became of them, in bins of the time at which they were due."""
    edges = np.linspace(0.0, seconds, BINS + 1)
    width = edges[1]
    found: dict[str, dict[str, list[float]]] = {}
    for name in sorted({name for _, name, _ in kinds}):
        found[name] = {}
        for kind in COLOURS:
            at_s = [at for at, n, k in kinds if (n, k) == (name, kind)]
            found[name][kind] = [
                round(float(count / width), 3) for count in np.histogram(at_s, bins=edges)[0]
            ]
    return {"at_s": [round(float(at), 2) for at in edges[:-1]], "per_s": found}


def _outcomes(panel: Any, series: dict[str, Any], name: str) -> None:
    by_kind = series["per_s"].get(name, {})
    present = [kind for kind in COLOURS if any(by_kind.get(kind, ()))]
    if present:
        heights = [by_kind[kind] for kind in present]
        panel.stackplot(series["at_s"], heights, labels=present, colors=[COLOURS[kind] for kind in present])
    panel.set_ylabel("requests/s")
    panel.set_title(name)


def _memory(panel: Any, memory: Sequence[dict[str, Any]]) -> None:
    for row in (row for row in memory if "at_s" in row):
        panel.plot(row["at_s"], row["pss_mib"], label=f"{row['process'][:34]} ({row['pid']})")
    panel.set_ylabel("PSS, MiB")
    panel.set_ylim(bottom=0)
    panel.set_title("memory of the largest processes")
