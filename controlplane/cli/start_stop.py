"""up, down, demo."""

from __future__ import annotations

import os
import sys
import webbrowser
from contextlib import nullcontext, redirect_stdout
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from controlplane.cli.output import print_json, print_text
from controlplane.cli.session import Json, session
from controlplane.cli.waiting import live_line

if TYPE_CHECKING:
    from controlplane.runtime.local import LocalCluster
    from controlplane.settings import Settings

Home = Annotated[Path | None, typer.Option(help="Folder of caches, logs and state. Default: OSTINATO_HOME.")]
Port = Annotated[int | None, typer.Option(min=1, max=65535, help="Port of the API.")]


def up(
    ctx: typer.Context,
    port: Port = None,
    home: Home = None,
    dashboard_port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port of Ray's dashboard; 0: a free port.")
    ] = 0,
    foreground: Annotated[
        bool,
        typer.Option(
            "--foreground", help="Keep running until stopped, then stop Ostinato: for systemd and similar."
        ),
    ] = False,
    json: Json = False,
) -> None:
    """Start Ostinato on this machine and return when its API answers. It is restarted after a crash."""
    from controlplane.runtime import local, start_checks

    start_checks.require_known_variables(os.environ)
    cli, settings = session(ctx), _settings(port, home)
    if dashboard_port and not settings.dashboard:
        raise typer.BadParameter(
            "OSTINATO_DASHBOARD=0 starts no dashboard; leave this option out, or unset that variable",
            param_hint="--dashboard-port",
        )
    with live_line(quiet=cli.json) as show:
        cluster = local.up(settings, show, dashboard_port=dashboard_port, supervised=not foreground)
    if cli.json:
        print_json(asdict(cluster))
    else:
        print_text(f"Ostinato answers at {cluster.url}{_where_dashboard(cluster)}")
    if foreground:
        from controlplane.runtime import supervisor

        supervisor.hold(local.with_gateways(settings))


def _where_dashboard(cluster: LocalCluster) -> str:
    if not cluster.dashboard_url:
        return ""
    return f"; the Ray dashboard at {cluster.dashboard_url} (`ostinato dashboard` has its token)"


def dashboard(
    ctx: typer.Context,
    home: Home = None,
    open_: Annotated[bool, typer.Option("--open/--no-open", help="Open the dashboard in a browser.")] = False,
    json: Json = False,
) -> None:
    """Print the address of this machine's Ray dashboard and the token that it asks for."""
    from controlplane import errors
    from controlplane.runtime import local

    cli, settings = session(ctx), _settings(None, home)
    if (cluster := local.find(settings)) is None:
        raise errors.Unavailable(
            f"no cluster with the home {settings.home} answers; start a cluster with `ostinato up`"
        )
    if not cluster.dashboard_url:
        raise errors.Unavailable(
            "this cluster was started without a dashboard; run `ostinato down`, then `ostinato up` without"
            " OSTINATO_DASHBOARD=0"
        )
    try:
        token = local.ray_token(settings)
    except OSError as e:
        raise errors.Unavailable(
            "an older version of Ostinato started this cluster without Ray's token; run `ostinato down`, then"
            " `ostinato up`"
        ) from e
    if cli.json:
        print_json({"url": cluster.dashboard_url, "token": token})
    else:
        print_text(f"{cluster.dashboard_url} asks for this token:\n{token}")
    if open_:
        webbrowser.open(cluster.dashboard_url)


def down(ctx: typer.Context, home: Home = None, json: Json = False) -> None:
    """Stop what `up` started. State and caches stay."""
    from controlplane.runtime import local

    cli = session(ctx)
    with live_line(quiet=cli.json) as show:
        stopped = local.down(_settings(None, home), show)
    if cli.json:
        print_json({"stopped": stopped})
    else:
        print_text("stopped" if stopped else "nothing was running")


def demo(ctx: typer.Context, json: Json = False) -> None:
    """Register and deploy a base model and its variants on this machine, and send them requests."""
    from controlplane.demo.run import main as run_demo  # only this command needs a cluster

    cli = session(ctx)
    with redirect_stdout(sys.stderr) if cli.json else nullcontext():
        code = run_demo()
    if cli.json:
        print_json({"ok": code == 0})
    raise typer.Exit(code)


def _settings(port: int | None, home: Path | None) -> Settings:
    """The environment's settings, overridden by the options."""
    from controlplane.settings import Settings

    chosen = {"http_port": port, "home": home}
    return Settings.model_validate(
        {
            **Settings().model_dump(exclude_unset=True),
            **{name: value for name, value in chosen.items() if value is not None},
        }
    )
