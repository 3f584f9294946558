"""Follows an operation with one live line on stderr."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from controlplane.cli.failures import Interrupted
from controlplane.cli.output import console
from controlplane.client.client import Client
from controlplane.management.schemas.models import OperationView
from controlplane.printable import printable


class Progress(Protocol):
    def __call__(self, line: str, /) -> None: ...


@contextmanager
def live_line(quiet: bool) -> Iterator[Progress]:
    """A line that is overwritten on a terminal, printed at each change elsewhere, and absent when quiet."""
    if quiet:
        yield lambda line: None
        return
    screen = console(stderr=True)
    if not screen.is_terminal:
        shown = ""

        def show(line: str) -> None:
            nonlocal shown
            if line != shown:
                screen.print(printable(line), soft_wrap=True)
            shown = line

        yield show
        return
    from rich.text import Text

    with screen.status("") as status:
        yield lambda line: status.update(Text(printable(line)))


def follow(client: Client, operation: OperationView, quiet: bool) -> OperationView:
    """Wait for an operation, and return it when finished. Errors: Interrupted, on Ctrl-C."""
    try:
        with live_line(quiet) as show:
            for view in client.watch(operation.id):
                operation = view
                show(progress_line(view))
    except KeyboardInterrupt as stop:
        raise Interrupted(operation) from stop
    return operation


def progress_line(view: OperationView) -> str:
    reason = f"  {view.reason}" if view.reason else ""
    return f"{view.target}: {view.phase} {view.progress:.0%}{reason}"
