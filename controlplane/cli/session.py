"""The state that all commands share: the API's address, the form of output, and the options for them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from controlplane import errors

if TYPE_CHECKING:
    from controlplane.client.client import Client

JSON_FLAG = "--json"


@dataclass
class Session:
    """One run of the command; the options set its fields."""

    url: str | None = None
    json: bool = False
    debug: bool = False

    def client(self) -> Client:
        from controlplane.client.client import Client  # help does not need it

        try:
            return Client(self.url)
        except errors.InvalidRequest as error:
            hint = "--url" if error.param == "url" else error.param
            raise typer.BadParameter(error.message, param_hint=hint) from error


def session(ctx: typer.Context) -> Session:
    """The session of a command. Raises BadParameter for an option that is NaN or infinite."""
    for parameter in ctx.command.params:
        value = ctx.params.get(parameter.name or "")
        if isinstance(value, float) and not math.isfinite(value):
            hint = f"'{parameter.opts[0]}'"
            raise typer.BadParameter(f"expected a finite number, got {value}", param_hint=hint)
    current: Session = ctx.obj
    return current


def asked_for_json(argv: Sequence[str]) -> bool:
    """Tell whether a command line that could not be parsed asked for JSON."""
    end = argv.index("--") if "--" in argv else len(argv)
    return JSON_FLAG in argv[:end]


def _use_json(ctx: typer.Context, value: bool) -> bool:
    if value:
        session(ctx).json = True
    return value


Json = Annotated[
    bool, typer.Option(JSON_FLAG, help="Print JSON and nothing else on stdout.", callback=_use_json)
]
NoWait = Annotated[bool, typer.Option("--no-wait", help="Print the operation's id and return at once.")]
