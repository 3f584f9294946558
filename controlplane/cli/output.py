"""Output to stdout: one JSON document (or JSON lines), or text and tables for people."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

from controlplane.printable import printable
from profiler.quantization import UNCOMPRESSED

if TYPE_CHECKING:
    from rich.console import Console

_NARROWEST_COLUMN = 8  # of a table on a terminal; narrower columns split words
_PIPED_WIDTH = 240  # a table cut at 80 columns would lose text that grep looks for


def console(stderr: bool = False) -> Console:
    """A console that prints names and reasons unchanged, without markup."""
    from rich.console import Console

    stream = sys.stderr if stderr else sys.stdout
    width = None if stream.isatty() else _PIPED_WIDTH
    return Console(file=stream, width=width, markup=False, emoji=False, highlight=False)


def print_json(document: Any) -> None:
    """Print one JSON document on one line, flushed so that a reader of a stream sees it at once."""
    print(json_text(document), flush=True)


def json_text(document: Any) -> str:
    """The document as JSON. JSON escapes some control characters itself; this escapes all others in the
    same way: \\u009b."""
    text = json.dumps(document, default=_plain, ensure_ascii=False)
    return text if printable(text) == text else json.dumps(document, default=_plain)


def _plain(value: object) -> object:
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    return str(value)


def print_text(text: str) -> None:
    print(printable(text), flush=True)


def print_table(columns: Sequence[str], rows: Iterable[Sequence[str]], empty: str) -> None:
    rows = [[printable(cell) for cell in row] for row in rows]
    if not rows:
        print_text(empty)
        return
    if not sys.stdout.isatty():
        _print_plain_table([columns, *rows])
        return
    if console().width < _NARROWEST_COLUMN * len(columns):
        _print_blocks(columns, rows)
        return
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*row)
    console().print(table)


def _print_blocks(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print rows for narrow terminals: a row is a block with a line for each non-empty cell."""
    for number, row in enumerate(rows):
        if number:
            print_text("")
        print_facts(zip(columns, row, strict=True))


def _print_plain_table(rows: Sequence[Sequence[str]]) -> None:
    """Print rows for pipes and files: a row is one line of any length, and ends with its last word."""
    lines = [[" ".join(cell.splitlines()) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        print_text("  ".join(f"{cell:<{width}}" for cell, width in zip(line, widths, strict=True)).rstrip())


def print_facts(facts: Iterable[tuple[str, str]]) -> None:
    """Print aligned `name  value` lines; empty values are left out."""
    kept = [(name, value) for name, value in facts if value]
    width = max((len(name) for name, _ in kept), default=0)
    for name, value in kept:
        print_text(f"{name:<{width}}  {value}")


def size(number_bytes: int) -> str:
    value = float(number_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def quantization_suffix(quantization: str) -> str:
    """A plan's suffix: empty for uncompressed layers."""
    return "" if quantization == UNCOMPRESSED else f" {quantization}"
