"""merge, and the helpers that it shares with compress: work on folders, done by this process.

The server does not write these folders. The operating system decides what a user may read and write; an API
that writes into its callers' folders would have to repeat these checks. A variant's name is only looked up;
its folders must be readable here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from controlplane import errors
from controlplane.cli.output import print_json, print_text
from controlplane.cli.session import Json, Session, session
from controlplane.cli.waiting import live_line
from controlplane.management.schemas.models import ModelView
from profiler.errors import AdapterError, CheckpointError


def merge(
    ctx: typer.Context,
    name: Annotated[str | None, typer.Argument(metavar="[VARIANT]", help="A registered variant.")] = None,
    *,
    to: Annotated[Path, typer.Option(help="The folder to write the checkpoint to.")],
    base: Annotated[Path | None, typer.Option(help="The base's folder, in place of a VARIANT.")] = None,
    variant: Annotated[Path | None, typer.Option(help="The variant's folder, together with --base.")] = None,
    json: Json = False,
) -> None:
    """Write a plain checkpoint with a variant merged into its base."""
    cli = session(ctx)
    base_folder, variant_folder = _folders(cli, name, base, variant)
    with folder_errors(), folder_progress(cli, to.name) as tell:
        from workers.deltas.merge import merge as write_merged

        write_merged(base_folder, variant_folder, to, tell)
    if cli.json:
        print_json({"folder": str(to.absolute()), "base": str(base_folder), "variant": str(variant_folder)})
        return
    print_text(f"{to} holds the merged checkpoint; register it with `ostinato register NAME {to}`")


def _folders(cli: Session, name: str | None, base: Path | None, variant: Path | None) -> tuple[Path, Path]:
    if base is not None and variant is not None and name is None:
        return base, variant
    if name is None or base is not None or variant is not None:
        raise typer.BadParameter("give either the name of a registered variant, or both --base and --variant")
    with cli.client() as client:
        variant_view = client.model(name)
        if variant_view.base is None:
            raise errors.InvalidRequest(f"'{name}' is a base; name one of its variants to merge")
        return _readable(client.model(variant_view.base)), _readable(variant_view)


def _readable(model: ModelView) -> Path:
    if model.path is None:
        raise errors.NotReady(f"'{model.model}' is {model.phase}; wait until it is Ready")
    folder = Path(model.path)
    if not folder.is_dir():
        raise errors.SourceUnreadable(
            f"the server read '{model.model}' from {folder}, which does not exist on this machine; run the "
            "command on a machine that has this folder, or copy the folders here and give --base and "
            "--variant"
        )
    return folder


@contextmanager
def folder_errors() -> Iterator[None]:
    """Turn errors of folders into errors that the command line reports."""
    try:
        yield
    except CheckpointError as error:
        raise errors.SourceUnreadable(str(error)) from error
    except AdapterError as error:
        raise errors.AdapterMismatch(str(error)) from error
    except ModuleNotFoundError as error:
        raise errors.Unavailable(
            f"{error.name} is not installed on this machine; run the command on a machine that runs engines"
        ) from error


@contextmanager
def folder_progress(cli: Session, what: str) -> Iterator[Callable[[float, str], None]]:
    """Show one line per percent."""
    shown = -1
    with live_line(quiet=cli.json) as show:

        def tell(share: float, doing: str) -> None:
            nonlocal shown
            if int(share * 100) > shown:
                shown = int(share * 100)
                show(f"{what}: {share:.0%}  {doing}")

        yield tell
