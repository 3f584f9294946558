"""The `ostinato` command: its subcommands, and the exit code of each result."""

from __future__ import annotations

import gc
import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer.core import TyperGroup

from controlplane.cli.lazy_commands import LazyCommand
from controlplane.cli.session import Json, Session, asked_for_json, session
from controlplane.errors import OstinatoError

if TYPE_CHECKING:
    from pydantic import ValidationError
    from pydantic_core import ErrorDetails

    from controlplane.cli.failures import ExitCode

# Each help text repeats the function's docstring, so that the list imports no command's module.
COMMANDS = (
    LazyCommand(
        "up",
        "controlplane.cli.start_stop",
        "Start Ostinato on this machine and return when its API answers. It is restarted after a crash.",
    ),
    LazyCommand("down", "controlplane.cli.start_stop", "Stop what `up` started. State and caches stay."),
    LazyCommand(
        "dashboard",
        "controlplane.cli.start_stop",
        "Print the address of this machine's Ray dashboard and the token that it asks for.",
    ),
    LazyCommand(
        "demo",
        "controlplane.cli.start_stop",
        "Register and deploy a base model and its variants on this machine, and send them requests.",
    ),
    LazyCommand(
        "register",
        "controlplane.cli.models",
        "Register a base by its SOURCE, or a variant by --base and --adapter.",
    ),
    LazyCommand("models", "controlplane.cli.models", "List the registered models."),
    LazyCommand("describe", "controlplane.cli.models", "Show all facts about one model and its deployment."),
    LazyCommand(
        "delete",
        "controlplane.cli.models",
        "Delete a model's registration. Its files stay, except a delta that Ostinato made.",
    ),
    LazyCommand(
        "profile",
        "controlplane.cli.estimates",
        "Measure what a model's profile lacks on the cluster's devices, and show the profile.",
    ),
    LazyCommand(
        "estimate",
        "controlplane.cli.estimates",
        "Estimate a plan of a model under a load: latency, throughput, cost and memory, with intervals.",
    ),
    LazyCommand(
        "deploy",
        "controlplane.cli.deployments",
        "Deploy a registered model. Ostinato chooses plan and devices by the intent.",
    ),
    LazyCommand(
        "undeploy", "controlplane.cli.deployments", "Stop serving a model. The model stays registered."
    ),
    LazyCommand("logs", "controlplane.cli.deployments", "Print the last lines of a deployment's engine."),
    LazyCommand(
        "tune",
        "controlplane.cli.variants",
        "Change a deployed base: how many variants run at once (set or measured), the number of engines, "
        "the requests' targets, or the engines' sizes.",
    ),
    LazyCommand(
        "prefetch",
        "controlplane.cli.variants",
        "Read variants into host memory before their next requests.",
    ),
    LazyCommand(
        "rebalance",
        "controlplane.cli.rebalance",
        "Move engines to make room for a waiting model, or to free a device. No request is dropped.",
    ),
    LazyCommand(
        "infer", "controlplane.cli.inference", "Send one request to a deployed model and print its answer."
    ),
    LazyCommand(
        "chat",
        "controlplane.cli.inference",
        "Chat with a deployed model. /exit or Ctrl-D leaves; Ctrl-C stops an answer.",
    ),
    LazyCommand(
        "evaluate",
        "controlplane.cli.evaluation",
        "Measure a deployed model on tasks, store the results with the model, and show them.",
    ),
    LazyCommand("operations", "controlplane.cli.operations", "List the operations and their progress."),
    LazyCommand(
        "watch",
        "controlplane.cli.operations",
        "Follow an operation until it is done. With --json, print one line per change.",
    ),
    LazyCommand("cancel", "controlplane.cli.operations", "Cancel an operation. What it made is removed."),
    LazyCommand(
        "compress",
        "controlplane.cli.compress",
        "Compress a fine-tune to a delta that can be registered as a variant, and print size and errors.",
    ),
    LazyCommand(
        "merge",
        "controlplane.cli.checkpoints",
        "Write a plain checkpoint with a variant merged into its base.",
    ),
    LazyCommand(
        "evaluate-estimator",
        "controlplane.cli.evaluate_estimator",
        "Predict measured plans from fingerprints, and print the errors of the predictions.",
    ),
    LazyCommand(
        "plan",
        "controlplane.cli.plan",
        "Place deployments on a described cluster, in order. Show the placements and what does not fit.",
    ),
    LazyCommand(
        "simulate",
        "controlplane.cli.simulate",
        "Simulate traffic on a described cluster: attainment, latencies and cost, or the engines needed.",
    ),
    LazyCommand(
        "status",
        "controlplane.cli.overview",
        "Show models, deployments, engines and devices. With a MODEL, show where its variants are.",
    ),
    LazyCommand(
        "cluster",
        "controlplane.cli.cluster",
        "Show nodes and devices: used, reserved and free memory, load, and holders of the memory.",
    ),
    LazyCommand(
        "keys", "controlplane.cli.keys", "Make a new API key for a tenant. `keys new` prints it once."
    ),
    LazyCommand("version", "controlplane.cli.overview", "Print the version of this command."),
)

app = typer.Typer(
    name="ostinato",
    help="Serve many LLMs and their fine-tuned variants from the GPUs you have.",
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.callback(invoke_without_command=True)
def options(
    ctx: typer.Context,
    url: Annotated[
        str | None, typer.Option(envvar="OSTINATO_URL", help="The API; default http://127.0.0.1:8000.")
    ] = None,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks.")] = False,
    json: Json = False,
) -> None:
    cli = session(ctx)
    cli.url, cli.debug = url, debug
    if ctx.invoked_subcommand is None:
        typer.echo(ctx.get_help())


def run(argv: Sequence[str]) -> int:
    """Run one command line; returns its exit code. With --debug a traceback comes before the two lines."""
    cli = Session()
    try:
        result = _group()(args=list(argv), prog_name="ostinato", standalone_mode=False, obj=cli)
    except (Exception, KeyboardInterrupt) as error:
        if cli.debug:
            traceback.print_exc()
        return int(_report(error, cli.json or asked_for_json(argv), _command(argv)))
    return result if isinstance(result, int) else 0


def _command(argv: Sequence[str]) -> str | None:
    names = {command.name for command in COMMANDS}
    return next((word for word in argv if word in names), None)


def _group() -> TyperGroup:
    group = typer.main.get_command(app)
    assert isinstance(group, TyperGroup)
    for command in COMMANDS:
        group.add_command(command)
    return group


def _report(error: BaseException, as_json: bool, command: str | None) -> ExitCode:
    from pydantic import ValidationError

    from controlplane.cli import failures

    match error:
        case OstinatoError():
            return failures.report_error(error, as_json)
        case failures.NotSucceeded():
            return failures.report_operation(error.operation, as_json)
        case failures.Interrupted():
            return failures.report_interrupt(error.operation, as_json)
        case ValidationError():
            return failures.report_usage(_problems(error), command, as_json)
        case typer.Abort() | KeyboardInterrupt():
            return failures.ExitCode.INTERRUPTED
    return _report_other(error, as_json, command)


def _report_other(error: BaseException, as_json: bool, command: str | None) -> ExitCode:
    from controlplane.cli import failures

    if isinstance(error, ModuleNotFoundError):
        return failures.report(_not_installed(error), "not_installed", failures.ExitCode.FAILED, as_json)
    if hasattr(error, "format_message"):  # click's usage errors, for any version of click
        message = error.format_message().replace("Value error, ", "")  # pydantic's, before what ours say
        return failures.report_usage(message, command, as_json)
    if isinstance(error, OSError) and error.strerror:  # an error of a disk or a folder: no defect
        return failures.report(_of_the_machine(error), "machine", failures.ExitCode.FAILED, as_json)
    what = f"{type(error).__name__}: {error}".rstrip(": ")
    return failures.report(
        f"{what}; this is a defect: run `ostinato --debug ...` again and report its output",
        "internal_error",
        failures.ExitCode.FAILED,
        as_json,
    )


def _of_the_machine(error: OSError) -> str:
    where = f"{error.filename}: " if error.filename else ""
    return f"{where}{error.strerror}; check this file or disk (`ostinato --debug ...` shows the failed call)"


def _not_installed(error: ModuleNotFoundError) -> str:
    return (
        f"the Python package {error.name} is not installed, and this command needs it; "
        "run `pip install 'ostinato[cpu]'` or `pip install 'ostinato[gpu]'`"
    )


def _problems(error: ValidationError) -> str:
    """The problems that pydantic found, as `field: problem`; a problem of the whole request has no field."""
    problems = [(_field(p["loc"]), _problem(p)) for p in error.errors()]
    return ", ".join(f"{field}: {problem}" if field else problem for field, problem in problems)


# The user's arguments, by the API's names.
GIVEN = {"inputText": "TEXT", "model": "NAME", "maxOutputLength": "--max-output"}
NAMES = "^[A-Za-z0-9][A-Za-z0-9._-]"  # how the pattern of names begins


def _field(where: Sequence[int | str]) -> str:
    name = ".".join(map(str, where))
    return GIVEN.get(name, name)


def _problem(found: ErrorDetails) -> str:
    match found["type"]:
        case "string_unicode":
            return "expected text in UTF-8, got other bytes"
        case "string_too_short":
            return "expected a text that is not empty, got an empty text"
        case "string_pattern_mismatch" if str(found.get("ctx", {}).get("pattern")).startswith(NAMES):
            return (
                "expected a letter or digit, then up to 94 letters, digits, '.', '_' or '-', "
                f"got {str(found['input'])[:100]!r}"
            )
    return found["msg"].removeprefix("Value error, ")


def _replace_closed_streams() -> None:
    """Replace streams that the caller closed, for which Python has None. They read as empty and discard
    output."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open(mode, encoding="utf-8"))  # noqa: SIM115 - until the end


def main() -> None:
    _replace_closed_streams()
    # httpx imports its own command line, with rich and pygments, unless this module is set.
    sys.modules.setdefault("httpx._main", None)  # type: ignore[arg-type]
    # Objects that imports make are not garbage; collecting repeatedly and at the end takes a fifth of a call.
    gc.set_threshold(50_000)
    code = run(sys.argv[1:])
    gc.freeze()
    sys.exit(code)


if __name__ == "__main__":
    main()
