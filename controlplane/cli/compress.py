"""compress: this process compresses a fine-tune in folders, and prints the cost."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from controlplane import errors
from controlplane.cli.checkpoints import folder_errors, folder_progress
from controlplane.cli.compression_facts import report_facts
from controlplane.cli.output import console, print_facts, print_json, print_text, size
from controlplane.cli.session import Json, session
from controlplane.printable import printable
from workers.compression.choose import MethodName, OptionError, Options, check, method_named, parse_ratio
from workers.compression.recipe import ROWS, TOKENS

if TYPE_CHECKING:
    from workers.compression.request import Report, Request

METHODS = ", ".join(MethodName)
FLAGS = {
    "group_size": "--group-size",
    "max_widths": "--max-widths",
    "max_loss": "--max-loss",
    "storage_mb_per_s": "--storage-mb-per-s",
}

Out = Annotated[Path | None, typer.Option("--out", help="The new folder to write to.")]
Method = Annotated[str, typer.Option(help=f"One of {METHODS}.")]
Bits = Annotated[int | None, typer.Option(help="Bits per kept value, 4 or 2.")]
Ratio = Annotated[
    str | None, typer.Option("--ratio", "--budget", help="Share of the 16-bit size, such as 1/16 or 0.0625.")
]
GroupSize = Annotated[
    int | None, typer.Option(help="Columns that share a scale, such as 64; default: a row.")
]
MaxWidths = Annotated[int | None, typer.Option(help="For deltamix: how many bit widths a layer may mix.")]
Calibration = Annotated[
    Path | None, typer.Option(help="A .txt or .jsonl file of typical texts; default: the bundled file.")
]
Rows = Annotated[int, typer.Option(min=1, help="Rows of text to use, at most.")]
Tokens = Annotated[int, typer.Option(min=1, help="Tokens of each row, at most.")]
Device = Annotated[str, typer.Option(help="Where to compute: cpu, cuda, cuda:1, ...")]
Evaluation = Annotated[
    Path | None,
    typer.Option(help="A .jsonl file of tasks, or a folder of such files, to measure the loss on."),
]
MaxLoss = Annotated[
    float | None, typer.Option(help="For auto: largest loss on any task, in points of 100 or percent.")
]
Lossless = Annotated[
    bool, typer.Option("--lossless", help="Pack files with zstd if that makes loading faster.")
]
Storage = Annotated[
    float | None, typer.Option(help="For --lossless: read rate of the engines' storage; default: measured.")
]
Force = Annotated[bool, typer.Option("--force", help="Continue although the base seems to be another model.")]


def compress(  # noqa: PLR0913 - typer reads a command's options from its parameters
    ctx: typer.Context,
    base: Annotated[Path, typer.Argument(help="The folder of the base model.")],
    finetuned: Annotated[
        Path, typer.Argument(help="The folder of a fine-tune of the base, or of an adapter for it.")
    ],
    folder: Annotated[Path | None, typer.Argument(metavar="[OUT]", help="The same as --out.")] = None,
    *,
    out: Out = None,
    method: Method = MethodName.deltacompress.value,
    bits: Bits = None,
    ratio: Ratio = None,
    group_size: GroupSize = None,
    max_widths: MaxWidths = None,
    calibration: Calibration = None,
    rows: Rows = ROWS,
    tokens: Tokens = TOKENS,
    device: Device = "cpu",
    evaluation: Evaluation = None,
    max_loss: MaxLoss = None,
    lossless: Lossless = False,
    storage_mb_per_s: Storage = None,
    force: Force = False,
    json: Json = False,
) -> None:
    """Compress a fine-tune to a delta that can be registered as a variant, and print size and errors.

    If the command is interrupted, run it again: it continues.
    """
    cli = session(ctx)
    options = _options(method, bits, ratio, group_size, max_widths)
    target = _target(folder, out)
    with folder_errors(), folder_progress(cli, target.name) as tell:
        from workers.compression.job import CalibrationOptions
        from workers.compression.request import Request

        _check_device(device)
        texts = CalibrationOptions(calibration, rows, tokens) if calibration or _calibrated(options) else None
        request = Request(
            base, finetuned, target, options, texts, device, force,
            evaluation, max_loss, lossless, storage_mb_per_s,
        )  # fmt: skip
        report = _run(request, tell)
    if cli.json:
        print_json(_document(report))
        return
    _print(request, report)


def _options(
    method: str, bits: int | None, ratio: str | None, group_size: int | None, max_widths: int | None
) -> Options:
    with _option_errors():
        share = None if ratio is None else parse_ratio(ratio)
        options = Options(method_named(method), bits, share, group_size, max_widths)
        check(options)
    return options


@contextmanager
def _option_errors() -> Iterator[None]:
    try:
        yield
    except OptionError as error:
        hint = FLAGS.get(error.option, f"--{error.option}")
        raise typer.BadParameter(str(error), param_hint=hint) from None


def _run(request: Request, tell: Callable[[float, str], None]) -> Report:
    from profiler.errors import AdapterError, TaskError
    from workers.compression.auto import LossTooLarge
    from workers.compression.checks import ImplausibleBase
    from workers.compression.run import run

    try:
        with _option_errors():
            return run(request, tell)
    except ImplausibleBase as error:
        raise AdapterError(f"{error}, or --force") from error
    except LossTooLarge as error:
        raise errors.LossTooLarge(str(error)) from error
    except TaskError as error:
        raise errors.InvalidRequest(f"{error}; see docs/evaluation.md", param="evaluation") from error


def _calibrated(options: Options) -> bool:
    from workers.compression.choose import method_of

    return options.method is MethodName.auto or method_of(options).calibrated


def _target(folder: Path | None, out: Path | None) -> Path:
    if (folder is None) == (out is None):
        raise typer.BadParameter("expected one folder to write to, as OUT or --out", param_hint="--out")
    target = out or folder
    assert target is not None
    return target


def _check_device(device: str) -> None:
    from workers.compression.job import require_device

    try:
        require_device(device)
    except OptionError as error:
        raise typer.BadParameter(str(error), param_hint="--device") from None


def _document(report: Report) -> dict[str, Any]:
    result = report.result
    return {
        "folder": str(result.folder),
        "method": _name(report),
        "kind": None if result.spec is None else result.spec.kind,
        "weightBytes": result.size_bytes,
        "ratio": result.ratio,
        "ratioWithoutEmbeddings": result.ratio_without_tables,
        "layerErrors": dict(result.layer_errors),
        "seconds": result.seconds,
        "peakMemoryBytes": result.peak_memory_bytes,
        "peakDeviceBytes": result.peak_device_bytes,
        "warnings": list(result.warnings),
        "quality": list(report.quality),
        "tried": list(report.tried),
        "lossless": dict(report.lossless),
    }


def _name(report: Report) -> str:
    from workers.compression.choose import method_of

    return method_of(report.options).name


def _print(request: Request, report: Report) -> None:
    result = report.result
    errors = ", ".join(f"{module} {error:.3g}" for module, error in result.layer_errors.items())
    device = f", {size(result.peak_device_bytes)} on the device" if result.peak_device_bytes else ""
    print_facts(
        (
            ("Folder", str(request.out)),
            ("Method", _name(report)),
            (
                "Size",
                f"{size(result.size_bytes)}, of which embedding and head take {size(result.table_bytes)}",
            ),
            ("Smaller", f"{result.ratio:.2f} times; {result.ratio_without_tables:.2f} without embeddings"),
            ("Layer error", f"{errors} (0: equals the fine-tune, 1: equals the base)" if errors else ""),
            ("Took", f"{result.seconds:.0f} s, memory {size(result.peak_memory_bytes)}{device}"),
            *report_facts(report),
        )
    )
    for warning in result.warnings:
        console(stderr=True).print(printable(f"Warning: {warning}"), soft_wrap=True)
    if result.spec is not None:
        print_text(f"Register it with `ostinato register NAME --base BASE --adapter {request.out}`")
        return
    print_text("The result is a plain checkpoint, to judge the method: engines do not serve it as a variant")
