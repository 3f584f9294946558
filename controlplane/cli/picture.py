"""Pictures as PNG files, wherever the command runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from controlplane import errors


@contextmanager
def drawing(path: Path, size: tuple[float, float]) -> Iterator[tuple[Any, Any]]:
    """A matplotlib figure of `size` inches and its axes, written to `path` at the end.

    Errors: InvalidRequest when the file cannot be written.
    """
    import matplotlib as mpl

    mpl.use("Agg")  # a file, with no screen
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=size)
    try:
        yield figure, axes
        figure.tight_layout()
        figure.savefig(path, dpi=120, format="png")
    except OSError as error:
        raise errors.InvalidRequest(
            f"'{path}' cannot be written ({error.strerror}); name a file in a folder of yours", param="plot"
        ) from error
    finally:
        plt.close(figure)
