"""One look for all plots of results: legends next to the curves, and numbers as a person says them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

DPI = 110


def new(rows: int, columns: int, panel: tuple[float, float], **options: Any) -> tuple[Any, Any]:
    """A figure of N panels of these inches, and its axes, rows by columns."""
    import matplotlib as mpl

    mpl.use("Agg")  # a file, with no screen
    import matplotlib.pyplot as plt

    plt.rc("font", size=11)
    plt.rc("axes", titlesize=12, labelsize=11)
    plt.rc("xtick", labelsize=10)
    plt.rc("ytick", labelsize=10)
    plt.rc("legend", fontsize=10)
    plt.rc("figure", titlesize=14)
    width, height = panel
    return plt.subplots(
        rows,
        columns,
        figsize=(width * columns, height * rows),
        squeeze=False,
        layout="constrained",
        **options,
    )


def plain_log(axis: Any, ticks: list[float] | None = None) -> None:
    """A logarithmic x or y axis (`axes.xaxis`), its scale set before, whose numbers are no powers of ten."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullFormatter, NullLocator

    low, high = sorted(axis.get_view_interval())
    decades = high / low if low > 0 else 1.0
    steps = (1.0, 1.5, 2.0, 3.0, 5.0, 7.0) if decades < 8 else (1.0, 2.0, 5.0) if decades < 160 else (1.0,)
    axis.set_major_locator(FixedLocator(ticks) if ticks else LogLocator(subs=steps, numticks=12))
    axis.set_major_formatter(FuncFormatter(lambda value, _: number(value)))
    axis.set_minor_locator(NullLocator())
    axis.set_minor_formatter(NullFormatter())


def number(value: float) -> str:
    """0.05, 2, 150, 2,000."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def legend(figure: Any, axes: Any, order: Sequence[str] = ()) -> None:
    """One for all panels, on their right; what several of them draw is named once."""
    named: dict[str, Any] = {}
    for panel in axes.flat:
        for handle, label in zip(*panel.get_legend_handles_labels(), strict=True):
            named.setdefault(label, handle)
    names = [*order] or [*named]
    figure.legend([named[name] for name in names], names, loc="outside right upper")


def below(axes: Any) -> None:
    """A panel's own legend, under its label."""
    axes.legend(loc="upper left", bbox_to_anchor=(0.0, -0.18), frameon=False)


def save(figure: Any, path: Path) -> None:
    import matplotlib.pyplot as plt

    figure.savefig(path, dpi=DPI)
    plt.close(figure)
