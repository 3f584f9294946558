"""status, version."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from typing import Annotated

import typer

from controlplane import __version__
from controlplane.cli.deployment_facts import deployment_facts, plan_shape, variants_at_once
from controlplane.cli.output import print_facts, print_json, print_table, print_text, size
from controlplane.cli.residency import print_residency
from controlplane.cli.session import Json, Session, session
from controlplane.management.schemas.models import DeploymentView, ModelView
from controlplane.management.schemas.placement import PlanView
from controlplane.management.schemas.status import EngineView, StatusView

COLUMNS = ("MODEL", "PHASE", "DEPLOYMENT", "ENGINE", "PLAN", "ON", "REASON")


def status(
    ctx: typer.Context,
    model: Annotated[str | None, typer.Argument(metavar="[MODEL]", help="Show only this deployment.")] = None,
    json: Json = False,
) -> None:
    """Show models, deployments, engines and devices. With a MODEL, show where its variants are."""
    cli = session(ctx)
    if model is not None:
        _status_of(cli, model)
        return
    with cli.client() as client:
        seen, models, deployments = client.status(), client.models(), client.deployments()
    if cli.json:
        print_json({"status": seen, "models": models, "deployments": deployments})
        return
    by_name = {d.model: d for d in deployments}
    engines: dict[str, list[EngineView]] = defaultdict(list)
    for engine in seen.engines:
        engines[engine.host].append(engine)
    rows = [_row(m, by_name.get(m.model), engines) for m in _bases_first(models)]
    print_table(COLUMNS, rows, empty="no models yet; `ostinato register MODEL SOURCE` adds one")
    print_text(f"\nOstinato {seen.version}, revision {seen.revision}; {_devices(seen)}")


def _status_of(cli: Session, model: str) -> None:
    with cli.client() as client:
        deployment = client.deployment(model)
    if cli.json:
        print_json({"deployment": deployment})
        return
    print_facts([("Deployment", f"{model}: {deployment.phase}"), *deployment_facts(deployment)])
    print_residency(deployment)


def version(ctx: typer.Context, json: Json = False) -> None:
    """Print the version of this command."""
    print_json({"version": __version__}) if session(ctx).json else print_text(__version__)


def _bases_first(models: list[ModelView]) -> list[ModelView]:
    """Each base, then its variants."""
    return sorted(models, key=lambda m: (m.base or m.model, m.base is not None, m.model))


def _row(m: ModelView, d: DeploymentView | None, engines: Mapping[str, list[EngineView]]) -> tuple[str, ...]:
    name = f"  {m.model}" if m.base else m.model
    if d is None:
        return (name, m.phase, "-", "", "", "", m.reason)
    ours = engines.get(d.host, [])
    reason = d.reason or m.reason or next((engine.message for engine in ours if engine.message), "")
    return (name, m.phase, d.phase, _engine(m, ours), _plan(d), _devices_of(d), reason)


def _engine(m: ModelView, engines: list[EngineView]) -> str:
    """A model's engines: a base's by status, a variant's by its base."""
    if not engines:
        return ""
    if m.base:
        return f"in '{m.base}'" if m.model in engines[0].variants else f"not yet in '{m.base}'"
    counts: Counter[str] = Counter()
    for engine in engines:
        counts[engine.status] += engine.replicas
    return ", ".join(f"{status} x{count}" for status, count in counts.items())


def _plans(d: DeploymentView) -> list[PlanView]:
    """The plans of all groups; older servers without groups give one plan."""
    placed = [group.plan for group in d.groups] or [d.plan]
    return [plan for plan in placed if plan is not None]


def _plan(d: DeploymentView) -> str:
    shapes = dict.fromkeys(plan_shape(plan) for plan in _plans(d))
    at_once = variants_at_once(d.variantsAtOnce) if d.model == d.host else ""
    return "; ".join([*shapes, *([f"variants at once: {at_once}"] if at_once else [])])


def _devices_of(d: DeploymentView) -> str:
    return "; ".join(", ".join(f"{r.node} {r.device}" for r in plan.ranks) for plan in _plans(d))


def _devices(seen: StatusView) -> str:
    free = [
        f"{d.node} {d.kind}:{d.index} {size(d.freeBytes)} of {size(d.totalBytes)} free" for d in seen.devices
    ]
    return ", ".join(free) or "no devices"
