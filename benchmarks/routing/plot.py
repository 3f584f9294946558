"""The largest rates of every policy, a panel for each scenario."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks import plot_style

OURS = "least-harm"


def rates(result: dict[str, Any], path: Path) -> None:
    of_scenarios = result["summary"]
    columns = min(4, len(of_scenarios))
    lines = -(-len(of_scenarios) // columns)
    names = list(dict.fromkeys(name for one in of_scenarios for name in one["rates"]))
    figure, axes = plot_style.new(lines, columns, (3.6, 0.6 + 0.3 * len(names)), sharey=True)
    for number, axis in enumerate(axes.flat):
        if number >= len(of_scenarios):
            axis.set_visible(False)
            continue
        one = of_scenarios[number]
        for at, name in enumerate(names):
            found = one["rates"].get(name)
            if found:
                color = "tab:orange" if name == OURS else "tab:blue"
                axis.barh(
                    at, found["mean"], xerr=found["half_of_95"] or 0.0, color=color, height=0.7, capsize=2
                )
        axis.set_yticks(range(len(names)), names)
        axis.invert_yaxis() if number == 0 else None
        axis.set_title(one["scenario"])
        axis.set_xlabel("requests a second")
    figure.suptitle("Largest rate with 99% of promises kept (mean over seeds, 95% interval)")
    plot_style.save(figure, path)
