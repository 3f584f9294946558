"""compress: a fine-tune on folders, by this process; what it cost is printed."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from controlplane.cli.checkpoints import folder_errors, folder_progress
from controlplane.cli.output import console, print_facts, print_json, print_text, size
from controlplane.cli.session import Json, session
from workers.compression.choose import MethodName, OptionError, Options, check, method_named, parse_ratio

if TYPE_CHECKING:
    from workers.compression.job import Job
    from workers.compression.result import Result

METHODS = ", ".join(name for name in MethodName if name is not MethodName.auto)
FLAGS = {"group_size": "--group-size", "max_widths": "--max-widths"}

Out = Annotated[Path | None, typer.Option("--out", help="The new folder to write to.")]
Method = Annotated[str, typer.Option(help=f"One of {METHODS}.")]
Bits = Annotated[int | None, typer.Option(help="Bits per kept value, 4 or 2.")]
Ratio = Annotated[
    str | None, typer.Option("--ratio", "--budget", help="Share of the 16-bit size, such as 1/16 or 0.0625.")
]
GroupSize = Annotated[int | None, typer.Option(help="Columns that share a scale; default: a row.")]
MaxWidths = Annotated[int | None, typer.Option(help="deltamix: how many bit widths a layer may mix.")]
Calibration = Annotated[
    Path | None, typer.Option(help="Texts like those it is to serve: .txt or .jsonl; default: a bundled one.")
]
Rows = Annotated[int, typer.Option(min=1, help="At most so many rows of the texts.")]
Tokens = Annotated[int, typer.Option(min=1, help="At most so many tokens a row.")]
Device = Annotated[str, typer.Option(help="Where to compute: cpu, cuda, cuda:1, ...")]
Force = Annotated[bool, typer.Option("--force", help="Go on though the base seems to be another model.")]


def compress(  # noqa: PLR0913 - typer reads a command's options from its parameters
    ctx: typer.Context,
    base: Annotated[Path, typer.Argument(help="The folder of the base model.")],
    finetuned: Annotated[Path, typer.Argument(help="The folder of a fine-tune of it, or of an adapter.")],
    folder: Annotated[Path | None, typer.Argument(metavar="[OUT]", help="The same as --out.")] = None,
    *,
    out: Out = None,
    method: Method = MethodName.deltacompress.value,
    bits: Bits = None,
    ratio: Ratio = None,
    group_size: GroupSize = None,
    max_widths: MaxWidths = None,
    calibration: Calibration = None,
    rows: Rows = 128,
    tokens: Tokens = 2048,
    device: Device = "cpu",
    force: Force = False,
    json: Json = False,
) -> None:
    """Compress a fine-tune to a delta that can be registered as a variant, and say what it cost.

    Stopped at any moment, the same command goes on where it was.
    """
    cli = session(ctx)
    options = _options(method, bits, ratio, group_size, max_widths)
    target = _target(folder, out)
    with folder_errors(), folder_progress(cli, target.name) as tell:
        from workers.compression.choose import method_of
        from workers.compression.job import CalibrationOptions, Job, compress

        _check_device(device)
        chosen = method_of(options)
        wanted = CalibrationOptions(calibration, rows, tokens) if calibration or chosen.calibrated else None
        job = Job(base, finetuned, target, chosen, wanted, device, force)
        result = compress(job, tell)
    if cli.json:
        print_json(_document(job, result))
        return
    _print(job, result)


def _options(
    method: str, bits: int | None, ratio: str | None, group_size: int | None, max_widths: int | None
) -> Options:
    try:
        share = None if ratio is None else parse_ratio(ratio)
        options = Options(method_named(method), bits, share, group_size, max_widths)
        check(options)
    except OptionError as error:
        hint = FLAGS.get(error.option, f"--{error.option}")
        raise typer.BadParameter(str(error), param_hint=hint) from None
    return options


def _target(folder: Path | None, out: Path | None) -> Path:
    if (folder is None) == (out is None):
        raise typer.BadParameter("expected the folder to write to, once", param_hint="--out")
    target = out or folder
    assert target is not None
    return target


def _check_device(device: str) -> None:
    import torch

    try:
        torch.zeros(1, device=device)
    except (AssertionError, RuntimeError) as error:
        reason = str(error).partition("\n")[0]
        raise typer.BadParameter(
            f"torch cannot compute on {device!r}: {reason}", param_hint="--device"
        ) from None


def _document(job: Job, result: Result) -> dict[str, Any]:
    return {
        "folder": str(result.folder),
        "method": job.method.name,
        "kind": None if result.spec is None else result.spec.kind,
        "weightBytes": result.size_bytes,
        "ratio": result.ratio,
        "ratioWithoutEmbeddings": result.ratio_without_tables,
        "layerErrors": dict(result.layer_errors),
        "seconds": result.seconds,
        "peakMemoryBytes": result.peak_memory_bytes,
        "peakDeviceBytes": result.peak_device_bytes,
        "warnings": list(result.warnings),
    }


def _print(job: Job, result: Result) -> None:
    errors = ", ".join(f"{module} {error:.3g}" for module, error in result.layer_errors.items())
    device = f", {size(result.peak_device_bytes)} on the device" if result.peak_device_bytes else ""
    print_facts(
        (
            ("Folder", str(job.out)),
            ("Method", job.method.name),
            ("Size", f"{size(result.size_bytes)}, {size(result.table_bytes)} of it embedding and head"),
            ("Smaller", f"{result.ratio:.2f} times; {result.ratio_without_tables:.2f} without embeddings"),
            ("Layer error", f"{errors} (0: the fine-tune, 1: the base)" if errors else ""),
            ("Took", f"{result.seconds:.0f} s, memory {size(result.peak_memory_bytes)}{device}"),
        )
    )
    for warning in result.warnings:
        console(stderr=True).print(f"Warning: {warning}", soft_wrap=True)
    if result.spec is not None:
        print_text(f"Register it with `ostinato register NAME --base BASE --adapter {job.out}`")
        return
    print_text("It is a plain checkpoint, for judging the method: no engine serves this form as a variant")
