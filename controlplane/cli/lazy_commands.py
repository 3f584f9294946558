"""Commands whose modules are imported when they run, so that `ostinato --help` starts at once."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import typer
from typer.core import TyperCommand


class LazyCommand(TyperCommand):
    """A command in the group's list with `name` and `help`; it runs the function of this name in `module`.

    Parsing begins with a context, which already belongs to the real command: its options, help and
    completion.
    """

    def __init__(self, name: str, module: str, help: str) -> None:
        super().__init__(name, help=help)
        self.module = module

    def load(self) -> TyperCommand:
        assert self.name is not None
        function = getattr(import_module(self.module), self.name.replace("-", "_"))
        alone = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
        alone.command(self.name)(function)
        command = typer.main.get_command(alone)
        assert isinstance(command, TyperCommand)
        return command

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        return self.load().make_context(info_name, args, parent, **extra)
