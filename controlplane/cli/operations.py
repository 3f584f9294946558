"""operations, watch, cancel."""

from __future__ import annotations

from typing import Annotated

import typer

from controlplane.cli.failures import Interrupted, require_success
from controlplane.cli.output import print_json, print_table, print_text
from controlplane.cli.session import Json, session
from controlplane.cli.waiting import follow
from controlplane.client.client import Client
from controlplane.management.schemas.models import OperationView

Id = Annotated[str, typer.Argument(metavar="OPERATION", help="An operation's id.")]


def operations(ctx: typer.Context, json: Json = False) -> None:
    """List the operations and their progress."""
    cli = session(ctx)
    with cli.client() as client:
        listed = client.operations()
    if cli.json:
        print_json({"operations": listed})
        return
    rows = [(o.id, o.kind, o.target, o.phase, f"{o.progress:.0%}", _why(o)) for o in listed]
    print_table(("OPERATION", "KIND", "TARGET", "PHASE", "DONE", "REASON"), rows, empty="no operations yet")


def watch(ctx: typer.Context, operation: Id, json: Json = False) -> None:
    """Follow an operation until it is done. With --json, print one line per change."""
    cli = session(ctx)
    with cli.client() as client:
        view = client.operation(operation)
        view = _print_each(client, view) if cli.json else follow(client, view, quiet=False)
    require_success(view)
    if not cli.json:
        print_text(f"{view.kind} '{view.target}' is {view.phase}")


def cancel(ctx: typer.Context, operation: Id, json: Json = False) -> None:
    """Cancel an operation. What it made is removed."""
    cli = session(ctx)
    with cli.client() as client:
        view = client.cancel(operation)
    if cli.json:
        print_json({"operation": view})
    elif view.done:
        print_text(f"operation {view.id} is already {view.phase}")
    else:
        print_text(f"operation {view.id} will be cancelled; `ostinato watch {view.id}` follows it")


def _print_each(client: Client, view: OperationView) -> OperationView:
    last = view
    try:
        for last in client.watch(view.id):
            print_json(last)
    except KeyboardInterrupt as stop:
        raise Interrupted(last) from stop
    return last


def _why(operation: OperationView) -> str:
    inner = (operation.error or {}).get("error", operation.error) or {}
    return str(inner.get("message") or operation.reason)
