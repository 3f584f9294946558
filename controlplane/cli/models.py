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
from controlplane.management.schemas.compression import ArtifactView, CompressionView
from controlplane.management.schemas.models import (
    ChatView,
    DeploymentView,
    ModelView,
    ModuleView,
    OperationView,
    RegisterModelRequest,
    VariantView,
)
from workers.fetching.remote_source import is_hub_name

Compression = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME=ACCURACY", help="An allowed quantization and its accuracy in percent; repeatable."
    ),
]


def register(  # noqa: PLR0913 - typer reads a command's options from its parameters
    ctx: typer.Context,
    model: Annotated[str, typer.Argument(help="The name for the model.")],
    source: Annotated[
        str | None,
        typer.Argument(
            help="The model: a folder, ORG/NAME of the hub, hf://, s3://, gs://, https:// or bundled://."
        ),
    ] = None,
    *,
    base: Annotated[str | None, typer.Option(help="The registered base of this variant.")] = None,
    adapter: Annotated[
        str | None,
        typer.Option(
            help="The variant (LoRA, BOFT or a compressed delta): a folder, or a URI as for SOURCE."
        ),
    ] = None,
    compression: Compression = None,
    method: Annotated[
        str | None,
        typer.Option(
            help="How to compress SOURCE to a delta of --base. Default: deltacompress; with --max-loss: auto."
        ),
    ] = None,
    bits: Annotated[int | None, typer.Option(help="Bits of each kept value, 4 or 2.")] = None,
    ratio: Annotated[
        str | None, typer.Option(help="Share of the 16-bit size, such as 1/16 or 0.0625.")
    ] = None,
    group_size: Annotated[
        int | None, typer.Option(help="Columns that share a scale. Default: a row.")
    ] = None,
    max_widths: Annotated[
        int | None, typer.Option(help="For deltamix: bit widths that a layer may mix.")
    ] = None,
    calibration: Annotated[str | None, typer.Option(help="A file of typical texts on the server.")] = None,
    rows: Annotated[int | None, typer.Option(help="For --calibration: number of texts to use.")] = None,
    tokens: Annotated[int | None, typer.Option(help="For --calibration: tokens of each text.")] = None,
    evaluation: Annotated[
        str | None, typer.Option(help="A file of tasks on the server, to measure the loss on.")
    ] = None,
    max_loss: Annotated[
        float | None, typer.Option(help="For auto: largest loss on any task, in percent.")
    ] = None,
    lossless: Annotated[
        bool, typer.Option("--lossless", help="Pack files with zstd if that makes loading faster.")
    ] = False,
    device: Annotated[str | None, typer.Option(help="Where to compress: auto, cpu or gpu.")] = None,
    no_wait: NoWait = False,
    json: Json = False,
) -> None:
    """Register a base by its SOURCE, or a variant by --base and --adapter.

    With a SOURCE and --base, the fine-tune SOURCE is compressed to a delta of the base.
    """
    cli = session(ctx)
    if (source is not None) + (adapter is not None) != 1 or (adapter is not None and base is None):
        raise typer.BadParameter(
            "give SOURCE (a base model), --base and --adapter (a variant), or SOURCE and --base (a fine-tune "
            "to compress to a delta of its base)"
        )
    fields: dict[str, object] = {"source": _location(source), "base": base, "adapter": _location(adapter)}
    recipe = {
        "method": method,
        "bits": bits,
        "ratio": None if ratio is None else _share(ratio),
        "groupSize": group_size,
        "maxWidths": max_widths,
        "calibration": _location(calibration),
        "rows": rows,
        "tokens": tokens,
        "evaluation": _location(evaluation),
        "maxLoss": max_loss,
        "lossless": lossless or None,
        "device": device,
    }
    given = {name: value for name, value in recipe.items() if value is not None}
    if given or (source is not None and base is not None and adapter is None):
        fields["compression"] = given
    if compression:
        fields["compressionTechnique"] = _accuracies(compression)
    request = RegisterModelRequest.model_validate({"model": model, **fields})
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
    """Show all facts about one model and its deployment."""
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
    """Delete a model's registration. Its files stay, except a delta that Ostinato made."""
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
    """A location: a URI or a hub's name unchanged, and a path made absolute, because the server runs in
    another folder. A folder that exists is meant before a name of the hub."""
    if text is None or "://" in text:
        return text
    path = Path(text).expanduser()
    return str(path.absolute()) if path.exists() or not is_hub_name(text) else text


def _share(text: str) -> float:
    from workers.compression.choose import OptionError, parse_ratio

    try:
        return parse_ratio(text)
    except OptionError as error:
        raise typer.BadParameter(str(error), param_hint="--ratio") from None


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
                f"expected NAME=ACCURACY, such as int8=99.2, got {pair!r}", param_hint="--compression"
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
        *_compression_facts(m.compression),
        *evaluation_facts(m.evaluations),
        *_chat_facts(m.chat),
        ("Variants", ", ".join(m.variants)),
        ("Reason", m.reason),
    ]


def _chat_facts(chat: ChatView | None) -> list[tuple[str, str]]:
    if chat is None:
        return []
    return [
        ("Tool calls", f"{chat.toolCallParser or 'only forced calls'}: {chat.toolCallReason}"),
        ("Reasoning", f"{chat.reasoningParser}: {chat.reasoningReason}" if chat.reasoningParser else ""),
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


def _compression_facts(c: CompressionView | None) -> list[tuple[str, str]]:
    if c is None:
        return []
    options = "".join(f", {name} {value}" for name, value in c.options.items())
    facts = [("Compression", c.method + options)]
    if c.artifact is not None:
        return [*facts, *_artifact_facts(c.artifact)]
    left = "" if c.etaS is None else f", about {c.etaS:.0f} s left"
    where = f" on {c.node}" if c.node else ""
    return [*facts, ("Progress", f"{c.share:.0%}{where}: {c.step}{left}")]


def _artifact_facts(a: ArtifactView) -> list[tuple[str, str]]:
    layer_errors = ", ".join(f"{name} {error:.3g}" for name, error in a.layerErrors.items())
    quality = ""
    if a.quality is not None:
        tasks = "; ".join(f"{t.task}: {t.metric} {t.before:.4g} -> {t.after:.4g}" for t in a.quality.losses)
        quality = f"{a.quality.accuracy:.1f}% of the fine-tune's ({tasks})"
    return [
        ("Made", f"{a.ratio:.1f} times smaller than {size(a.uncompressedBytes)}, in {a.seconds:.0f} s"),
        ("Quality", quality),
        ("Layer errors", layer_errors),
        ("Warnings", "; ".join(a.warnings)),
    ]


def _numbers(m: ModuleView) -> str:
    if m.rank:
        return f" (rank {m.rank})"
    return f" (m={m.factors}, b={m.blockSize})" if m.factors else ""


def _origin(m: ModelView) -> str:
    return f"{m.base} + {m.adapter or m.source}" if m.base else m.source or ""


def _size(m: ModelView) -> str:
    return "" if m.weightBytes is None else size(m.weightBytes)
