"""Pictures as PNG files, also on machines without a screen."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from controlplane import errors


@contextmanager
def drawing(path: Path, size: tuple[float, float], panels: int = 1) -> Iterator[tuple[Any, Any]]:
    """A matplotlib figure of `size` inches and its axes, written to `path` at the end. Several panels stand
    next to each other, as an array of axes; legends may be placed outside.

    Errors: InvalidRequest when the file cannot be written.
    """
    import matplotlib as mpl

    mpl.use("Agg")  # draws a file without a screen
    import matplotlib.pyplot as plt

    layout = "tight" if panels == 1 else "constrained"
    figure, axes = plt.subplots(1, panels, figsize=size, layout=layout)
    try:
        yield figure, axes
        figure.savefig(path, dpi=120, format="png")
    except OSError as error:
        raise errors.InvalidRequest(
            f"'{path}' cannot be written ({error.strerror}); name a file in a folder that you may write to",
            param="plot",
        ) from error
    finally:
        plt.close(figure)
