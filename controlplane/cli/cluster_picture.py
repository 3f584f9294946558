"""A picture of a cluster: each GPU is a bar of its memory, coloured by model, with the layers it holds."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from controlplane.cli.picture import drawing
from placement.solver.cluster import Gpu
from placement.solver.whatif import WhatIf

GIB = 2**30
MAX_BARS = 64  # more bars are unreadable
MAX_COLOURS = 20


def draw(outcome: WhatIf, path: Path) -> None:
    """Write a PNG. Errors: InvalidRequest when the file cannot be written."""
    bars = [(f"{node.name}:{gpu.index}", gpu) for node in outcome.cluster.nodes for gpu in node.gpus]
    shown = sorted(bars, key=lambda bar: not bar[1].residents)[:MAX_BARS] if len(bars) > MAX_BARS else bars
    names = [request.name for request, _ in outcome.placed]
    with drawing(path, (max(6, 0.7 * len(shown) + 3), 5)) as (_, axes):
        _bars(axes, [gpu for _, gpu in shown], names)
        axes.set_xticks(range(len(shown)), [name for name, _ in shown], rotation=60, fontsize=7)
        left_out = f" ({len(shown)} of {len(bars)} GPUs)" if len(shown) < len(bars) else ""
        title = f"{outcome.policy}: {len(names)} placed, {len(outcome.not_placed)} not{left_out}"
        axes.set(ylabel="memory (GiB); gray: used before", title=title)


def _bars(axes: Any, gpus: Sequence[Gpu], names: Sequence[str]) -> None:
    """Draw the bars. `names`: the deployments with their own colour."""
    import matplotlib as mpl

    colours = {name: mpl.colormaps["tab20"](number % MAX_COLOURS) for number, name in enumerate(names)}
    for at, gpu in enumerate(gpus):
        bottom = _used_before(gpu)
        axes.bar(at, gpu.total_bytes / GIB, color="white", edgecolor="gray", zorder=1)
        axes.bar(at, bottom, color="lightgray", zorder=2)
        for held in gpu.residents:
            height = held.memory_bytes / GIB
            colour = colours.get(held.deployment, "lightgray")
            axes.bar(at, height, bottom=bottom, color=colour, edgecolor="black", linewidth=0.5, zorder=3)
            text = f"{held.deployment}\n{held.layer_start}-{held.layer_end - 1}"
            axes.text(at, bottom + height / 2, text, ha="center", va="center", fontsize=6, zorder=4)
            bottom += height


def _used_before(gpu: Gpu) -> float:
    """Memory in use (GiB) that belongs to no resident."""
    held = sum(resident.memory_bytes for resident in gpu.residents)
    return max(0, gpu.total_bytes - gpu.free_bytes - held) / GIB
