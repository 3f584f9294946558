"""The `ostinato` command: its subcommands, and how each way of ending becomes an exit code."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Sequence
from typing import Annotated

import typer
from pydantic import ValidationError

from controlplane.cli import (
    checkpoints,
    cluster,
    deployments,
    estimates,
    estimators,
    failures,
    inference,
    models,
    nodes,
    operations,
    overview,
    plan,
    rebalance,
    variants,
)
from controlplane.cli.failures import ExitCode
from controlplane.cli.session import Json, Session, asked_for_json, session
from controlplane.errors import OstinatoError

app = typer.Typer(
    name="ostinato",
    help="Serve many LLMs and their fine-tuned variants from the GPUs you have.",
    add_completion=False,
    pretty_exceptions_enable=False,
)
for command in (
    *(cluster.up, cluster.down, cluster.demo),
    *(models.register, models.models, models.describe, models.delete),
    *(estimates.profile, estimates.estimate),
    *(deployments.deploy, deployments.undeploy, deployments.logs),
    *(variants.tune, variants.prefetch, rebalance.rebalance),
    *(inference.infer, inference.chat),
    *(operations.operations, operations.watch, operations.cancel),
    *(checkpoints.compress, checkpoints.merge, estimators.evaluate_estimator, plan.plan),
    *(overview.status, nodes.cluster, overview.version),
):
    app.command()(command)


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
    """One command line, and its exit code. With --debug a traceback comes before the two lines."""
    cli = Session()
    try:
        result = typer.main.get_command(app)(
            args=list(argv), prog_name="ostinato", standalone_mode=False, obj=cli
        )
    except (Exception, KeyboardInterrupt) as error:
        if cli.debug:
            traceback.print_exc()
        return int(_report(error, cli.json or asked_for_json(argv)))
    return result if isinstance(result, int) else ExitCode.OK


def _report(error: BaseException, as_json: bool) -> ExitCode:
    match error:
        case OstinatoError():
            return failures.report_error(error, as_json)
        case failures.NotSucceeded():
            return failures.report_operation(error.operation, as_json)
        case failures.Interrupted():
            return failures.report_interrupt(error.operation, as_json)
        case ValidationError():
            return failures.report(_problems(error), failures.USAGE, ExitCode.USAGE, as_json)
        case typer.Abort() | KeyboardInterrupt():
            return ExitCode.INTERRUPTED
    return _report_other(error, as_json)


def _report_other(error: BaseException, as_json: bool) -> ExitCode:
    if hasattr(error, "format_message"):  # click's usage errors, whichever click typer brings
        return failures.report(error.format_message(), failures.USAGE, ExitCode.USAGE, as_json)
    what = f"{type(error).__name__}: {error}".rstrip(": ")
    return failures.report(
        f"{what}; run `ostinato --debug ...` to see where", "internal_error", ExitCode.FAILED, as_json
    )


def _problems(error: ValidationError) -> str:
    """What pydantic found, as `field: problem`; a problem of the whole has no field."""
    found = [(".".join(map(str, p["loc"])), p["msg"].removeprefix("Value error, ")) for p in error.errors()]
    return ", ".join(f"{field}: {problem}" if field else problem for field, problem in found)


def main() -> None:
    sys.exit(run(sys.argv[1:]))


if __name__ == "__main__":
    main()
