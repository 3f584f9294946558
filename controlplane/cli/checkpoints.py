"""compress, merge: work on folders, done by this process.

The server has no part in the writing: what a user may read and write is for the operating system to say,
and an API that writes checkpoints into folders named by its callers would have to say it again. A variant's
name is only looked up; its folders must be readable here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from controlplane import errors
from controlplane.cli.output import print_json, print_text, size
from controlplane.cli.session import Json, Session, session
from controlplane.cli.waiting import live_line
from controlplane.management.schemas.models import ModelView
from profiler.errors import AdapterError, CheckpointError


class MethodName(StrEnum):
    sparse = "sparse"
    svd = "svd"


Bits = Annotated[int, typer.Option(help="sparse: bits per kept value, 4 or 2.")]
GroupSize = Annotated[int | None, typer.Option(help="sparse: columns that share a scale; default: a row.")]
Budget = Annotated[float, typer.Option(help="svd: share of the fine-tune's 16-bit size.")]
Device = Annotated[str, typer.Option(help="Where to compute: cpu, cuda, cuda:1, ...")]


def compress(  # noqa: PLR0913 - typer reads a command's options from its parameters
    ctx: typer.Context,
    base: Annotated[Path, typer.Argument(help="The folder of the base model.")],
    finetuned: Annotated[Path, typer.Argument(help="The folder of a full fine-tune of it.")],
    out: Annotated[Path, typer.Argument(help="The folder to write the delta to.")],
    *,
    method: Annotated[MethodName, typer.Option(help="2:4 sparse or low-rank.")] = MethodName.sparse,
    bits: Bits = 4,
    group_size: GroupSize = None,
    budget: Budget = 1 / 16,
    device: Device = "cpu",
    json: Json = False,
) -> None:
    """Compress a full fine-tune to a delta that can be registered as a variant."""
    if bits not in (4, 2):
        raise typer.BadParameter(f"expected 4 or 2, got {bits}", param_hint="--bits")
    if not 0 < budget <= 1:
        raise typer.BadParameter(f"expected a share above 0 and up to 1, got {budget}", param_hint="--budget")
    cli = session(ctx)
    with _folder_errors(), _progress(cli, out.name) as tell:
        from workers.deltas.pack import pack, sparse_method, svd_method

        chosen = sparse_method(bits, group_size) if method is MethodName.sparse else svd_method(budget)
        spec = pack(base, finetuned, out, chosen, tell, device)
    if cli.json:
        print_json({"folder": str(out.absolute()), "kind": spec.kind, "weightBytes": spec.weight_bytes})
        return
    print_text(
        f"{out} holds {size(spec.weight_bytes)}, {size(spec.full_bytes)} of it whole tensors; "
        f"register it with `ostinato register NAME --base BASE --adapter {out}`"
    )


def merge(
    ctx: typer.Context,
    name: Annotated[str | None, typer.Argument(metavar="[VARIANT]", help="A registered variant.")] = None,
    *,
    to: Annotated[Path, typer.Option(help="The folder to write the checkpoint to.")],
    base: Annotated[Path | None, typer.Option(help="Instead of a name: the base's folder ...")] = None,
    variant: Annotated[Path | None, typer.Option(help="... and the variant's.")] = None,
    json: Json = False,
) -> None:
    """Write a plain checkpoint with a variant merged into its base."""
    cli = session(ctx)
    base_folder, variant_folder = _folders(cli, name, base, variant)
    with _folder_errors(), _progress(cli, to.name) as tell:
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
            f"the server read '{model.model}' from {folder}, which is no folder here; run this on a machine "
            "that sees it, or copy the folders and give --base and --variant"
        )
    return folder


@contextmanager
def _folder_errors() -> Iterator[None]:
    """What can be wrong with folders, as the errors that the command line reports."""
    try:
        yield
    except CheckpointError as error:
        raise errors.SourceUnreadable(str(error)) from error
    except AdapterError as error:
        raise errors.AdapterMismatch(str(error)) from error
    except ModuleNotFoundError as error:
        raise errors.Unavailable(f"{error.name} is not installed here; run this where engines run") from error


@contextmanager
def _progress(cli: Session, what: str) -> Iterator[Callable[[float, str], None]]:
    """One line per percent."""
    shown = -1
    with live_line(quiet=cli.json) as show:

        def tell(share: float, doing: str) -> None:
            nonlocal shown
            if int(share * 100) > shown:
                shown = int(share * 100)
                show(f"{what}: {share:.0%}  {doing}")

        yield tell
