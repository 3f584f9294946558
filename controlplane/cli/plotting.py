"""A picture of a model's plans: latency against cost, memory as colour, and the Pareto front as a line."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from controlplane.cli.output import quantization_suffix
from controlplane.cli.picture import drawing
from controlplane.management.schemas.estimates import EstimateView

GIB = 2**30


def draw(plans: Sequence[EstimateView], chosen: EstimateView, path: Path) -> None:
    """Write a PNG. Errors: InvalidRequest when the file cannot be written."""
    with drawing(path, (8, 5)) as (figure, axes):
        _draw(figure, axes, plans, chosen)


def _draw(figure: Any, axes: Any, plans: Sequence[EstimateView], chosen: EstimateView) -> None:
    points = axes.scatter(
        [p.latencyMs.value for p in plans],
        [p.costGibS for p in plans],
        c=[p.memoryBytes / GIB for p in plans],
        cmap="viridis",
        zorder=3,
    )
    for p in plans:
        between = [[p.latencyMs.value - p.latencyMs.low], [p.latencyMs.high - p.latencyMs.value]]
        axes.errorbar(p.latencyMs.value, p.costGibS, xerr=between, color="lightgray", zorder=1)
        axes.annotate(label(p), (p.latencyMs.value, p.costGibS), xytext=(4, 4), textcoords="offset points")
    front = sorted((p.latencyMs.value, p.costGibS) for p in plans if p.pareto)
    xs, ys = [x for x, _ in front], [y for _, y in front]
    axes.plot(xs, ys, color="black", linewidth=0.8, label="Pareto front")
    axes.scatter(
        [chosen.latencyMs.value], [chosen.costGibS], marker="x", color="red", zorder=4, label=label(chosen)
    )
    axes.set(
        xlabel="latency of the load (ms), with its interval",
        ylabel="cost (GiB-seconds)",
        title=f"{chosen.model}: {chosen.batch} x ({chosen.inputTokens} in, {chosen.outputTokens} out), "
        f"{chosen.basis}",
    )
    axes.legend(fontsize=8)
    figure.colorbar(points, label="memory of all ranks (GiB)")


def label(e: EstimateView) -> str:
    """A plan's label: TP x the layers of its stages, and their quantization."""
    return f"{e.tensorParallel}x({'+'.join(map(str, e.layersPerStage))}){quantization_suffix(e.quantization)}"
