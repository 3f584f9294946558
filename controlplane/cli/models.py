"""register, models, describe, delete."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from controlplane.cli.deployment_facts import deployment_facts
from controlplane.cli.evaluation import evaluation_facts
from controlplane.cli.failures import require_success
from controlplane.cli.output import print_facts, print_json, print_table, print_text, size
from controlplane.cli.residency import print_residency
from controlplane.cli.session import Json, NoWait, session
from controlplane.cli.waiting import follow
from controlplane.client.client import Client
from controlplane.errors import ModelNotFound
from controlplane.management.schemas.models import (
    DeploymentView,
    ModelView,
    ModuleView,
    OperationView,
    RegisterModelRequest,
    VariantView,
)

Compression = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME=ACCURACY", help="A technique allowed and its accuracy in percent; repeatable."
    ),
]


def register(  # noqa: PLR0913 - typer reads a command's options from its parameters
    ctx: typer.Context,
    model: Annotated[str, typer.Argument(help="The name to give it.")],
    source: Annotated[str | None, typer.Argument(help="file://..., bundled://... or a folder.")] = None,
    *,
    base: Annotated[str | None, typer.Option(help="The registered base of this variant.")] = None,
    adapter: Annotated[
        str | None, typer.Option(help="The variant's folder: LoRA, BOFT or a compressed delta.")
    ] = None,
    compression: Compression = None,
    no_wait: NoWait = False,
    json: Json = False,
) -> None:
    """Register a base by its SOURCE, or a variant by --base and --adapter."""
    cli = session(ctx)
    fields = {"source": _location(source), "base": base, "adapter": _location(adapter)}
    techniques = {"compressionTechnique": _accuracies(compression)} if compression else {}
    request = RegisterModelRequest.model_validate({"model": model, **fields, **techniques})
    with cli.client() as client:
        operation = client.register_model(request)
        if no_wait:
            print_json({"operation": operation}) if cli.json else print_text(operation.id)
            return
        operation = follow(client, operation, quiet=cli.json)
        view = _find(client, model)
    if cli.json:
        print_json({"operation": operation, "model": view})
    require_success(operation)
    if not cli.json:
        print_text(f"'{model}' is {operation.phase}; deploy it with `ostinato deploy {model}`")


def models(ctx: typer.Context, json: Json = False) -> None:
    """List the registered models."""
    cli = session(ctx)
    with cli.client() as client:
        registered = client.models()
    if cli.json:
        print_json({"models": registered})
        return
    rows = [
        (m.model, m.phase, "yes" if m.deployed else "no", _origin(m), _size(m), m.reason) for m in registered
    ]
    print_table(
        ("MODEL", "PHASE", "DEPLOYED", "FROM", "WEIGHTS", "REASON"),
        rows,
        empty="no models yet; `ostinato register MODEL SOURCE` adds one",
    )


def describe(
    ctx: typer.Context, name: Annotated[str, typer.Argument(help="A model.")], json: Json = False
) -> None:
    """Show all that is known of one model and its deployment."""
    cli = session(ctx)
    with cli.client() as client:
        model = client.model(name)
        deployment: DeploymentView | None = None
        with suppress(ModelNotFound):
            deployment = client.deployment(name)
    if cli.json:
        print_json({"model": model, "deployment": deployment})
        return
    print_facts(_model_facts(model))
    if deployment is not None:
        print_text("")
        print_facts([("Deployment", deployment.phase), *deployment_facts(deployment)])
        print_residency(deployment)


def delete(
    ctx: typer.Context, model: Annotated[str, typer.Argument(help="A model.")], json: Json = False
) -> None:
    """Forget a registered model; its files stay."""
    cli = session(ctx)
    with cli.client() as client:
        operation = client.delete_model(model)
        if not operation.done:
            operation = follow(client, operation, quiet=cli.json)
    if cli.json:
        print_json({"operation": operation})
    require_success(operation)
    if not cli.json:
        print_text(_deleted(model, operation))


def _deleted(model: str, operation: OperationView) -> str:
    return f"'{model}' is {operation.phase}" + (f": {operation.reason}" if operation.reason else "")


def _find(client: Client, name: str) -> ModelView | None:
    with suppress(ModelNotFound):
        return client.model(name)
    return None


def _location(text: str | None) -> str | None:
    """A URI as it is; a path relative to this folder made absolute, for the server runs elsewhere."""
    if text is None or "://" in text:
        return text
    return str(Path(text).expanduser().absolute())


def _accuracies(pairs: list[str]) -> dict[str, float]:
    accuracies = {}
    for pair in pairs:
        name, _, accuracy = pair.rpartition("=")
        try:
            accuracies[name] = float(accuracy)
        except ValueError:
            name = ""
        if not name:
            raise typer.BadParameter(
                f"expected NAME=ACCURACY, such as int8=99.2; got {pair!r}", param_hint="--compression"
            )
    return accuracies


def _model_facts(m: ModelView) -> list[tuple[str, str]]:
    return [
        ("Model", m.model),
        ("Kind", m.kind or ""),
        ("Phase", m.phase),
        ("From", _origin(m)),
        ("Weights", _size(m)),
        *_variant_facts(m.variant),
        ("Accuracy", ", ".join(f"{name} {accuracy:g}%" for name, accuracy in m.compressionTechnique.items())),
        *evaluation_facts(m.evaluations),
        ("Variants", ", ".join(m.variants)),
        ("Reason", m.reason),
    ]


def _variant_facts(v: VariantView | None) -> list[tuple[str, str]]:
    if v is None:
        return []
    parts = [name for name, on in (("embedding", v.replacesEmbedding), ("head", v.replacesHead)) if on]
    return [
        ("Adapts", ", ".join(f"{name}{_numbers(m)}" for name, m in v.modules.items())),
        ("Bits", "/".join(map(str, v.bits))),
        (
            "Replaces",
            ", ".join((f"{size(v.fullBytes)} of the base's tensors", *parts)) if v.fullBytes else "",
        ),
    ]


def _numbers(m: ModuleView) -> str:
    if m.rank:
        return f" (rank {m.rank})"
    return f" (m={m.factors}, b={m.blockSize})" if m.factors else ""


def _origin(m: ModelView) -> str:
    return f"{m.base} + {m.adapter}" if m.base else m.source or ""


def _size(m: ModelView) -> str:
    return "" if m.weightBytes is None else size(m.weightBytes)
