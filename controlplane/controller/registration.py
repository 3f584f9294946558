"""Registration's work: find the files of a model's URI, read them, check them. No weights are kept.

For a base the configs and headers are read. For a variant, which is smaller, every byte is read once. This
runs in a process with limits (`file_reader`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from controlplane import errors
from controlplane.controller import sources
from controlplane.planning import accuracy, fetching
from controlplane.state.deltas import Artifact, Delta, Quality
from controlplane.state.records import Model, Phase
from profiler.chat_format import ChatFormat, family_of, read_chat_format, variant_format
from profiler.checkpoint import declared_fingerprint, read_model
from profiler.errors import AdapterError, CheckpointError
from profiler.files import is_file, read_json, shown
from profiler.tokenizer_file import named, read_tokenizer
from profiler.types import ModelSpec
from profiler.variants.delta import DELTA
from profiler.variants.held import held_bytes
from profiler.variants.modules import require_adaptable
from profiler.variants.reading import read_manifest
from profiler.variants.side_files import own_template, own_words
from profiler.variants.types import VariantKind, VariantLimits, VariantSpec
from profiler.variants.verifying import verify_data
from workers.compression.lines import quality_of
from workers.compression.recipe import BUNDLED

Convert = Callable[[str], Path]
Growing = Callable[[int], None]


@dataclass(frozen=True)
class Limits:
    """`compare_tokenizers`: an engine of this installation converts texts to ids, which must equal the
    file's."""

    roots: tuple[Path, ...]
    max_lora_rank: int
    compare_tokenizers: bool = False


def _unheard(more_bytes: int) -> None:
    pass


def unexpected(error: Exception) -> errors.OstinatoError:
    return errors.OstinatoError(f"an unexpected error while the files were read: {error!r}")


def read_model_files(
    model: Model, base: Model | None, limits: Limits, convert: Convert, growing: Growing = _unheard
) -> Model:
    """The model, Ready, with its folder and what was read from it; a fine-tune must be compressed first.

    `convert(name)` makes the folder of a bundled model. `growing(count)` is called with the number of bytes
    to read, after headers and configs were found sound. Errors: InvalidRequest, PathNotAllowed,
    SourceUnreadable, AdapterMismatch.
    """
    try:
        if model.delta is not None and model.delta.artifact is None:
            return _fine_tune(model, model.delta, base, limits, convert)
        if model.is_variant:
            return _variant(model, base, limits, growing)
        return _base(model, limits, convert)
    except AdapterError as e:
        raise errors.AdapterMismatch(
            f"'{model.name}' does not fit its base '{model.base}': {e}", param="adapter"
        ) from e
    except CheckpointError as e:
        raise errors.SourceUnreadable(str(e), param="adapter" if model.is_variant else "source") from e


def _fine_tune(model: Model, delta: Delta, base: Model | None, limits: Limits, convert: Convert) -> Model:
    """The model, Compressing, with the folder of the fine-tune and the files of its recipe."""
    if base is None or base.spec is None:
        raise errors.ModelNotFound(f"the base '{model.base}' is no longer registered", param="base")
    folder = _folder(model, limits, convert)
    try:
        require_adaptable(base.spec)
    except AdapterError as e:
        raise errors.AdapterMismatch(
            f"variants of '{base.name}' cannot be served: {e}; or register the fine-tune as a base",
            param="base",
        ) from e
    recipe = replace(
        delta.recipe,
        calibration=_file(delta.recipe.calibration, limits, "compression.calibration"),
        evaluation=_file(delta.recipe.evaluation, limits, "compression.evaluation", folders=True),
    )
    reason, texts = "waits to be compressed", Path(recipe.calibration) if recipe.calibration else BUNDLED
    made = replace(delta, tuned=str(folder), recipe=recipe, doing=reason, text_bytes=texts.stat().st_size)
    return replace(model, phase=Phase.COMPRESSING, delta=made, reason=reason)


def _folder(model: Model, limits: Limits, convert: Convert) -> Path:
    """The folder of `source`."""
    if (fetched := fetching.fetched_of(model, model.source or "")) is not None:
        return sources.require_folder(Path(fetched.folder), limits.roots, "source")
    source = sources.parse(model.source or "", limits.roots, "source")
    if isinstance(source, sources.BundledSource):
        return convert(source.name)
    return sources.require_folder(source, limits.roots, "source")


def _file(uri: str, limits: Limits, param: str, folders: bool = False) -> str:
    """The path of a file, if one was named."""
    return str(sources.require_file(uri, limits.roots, param, folders)) if uri else ""


def _base(model: Model, limits: Limits, convert: Convert) -> Model:
    folder = _folder(model, limits, convert)
    spec = read_model(folder)
    if model.spec is not None:
        _require_same(model, spec, folder)
    reason = f"{spec.architecture}, {spec.num_layers} layers, {spec.weight_bytes / 2**20:.0f} MiB of weights"
    tokenizer = read_tokenizer(folder)
    if tokenizer is not None and (beyond := tokenizer.beyond(spec.vocab_size)):
        reason += f"; requests with {named(beyond)} are refused, because the vocabulary has no rows for them"
    chat = read_chat_format(folder)
    return replace(model, phase=Phase.READY, path=str(folder), spec=spec, chat=chat, reason=reason)


def _require_same(model: Model, spec: ModelSpec, folder: Path) -> None:
    """Check that a model that is read again has the same weights. Errors: CheckpointError."""
    assert model.spec is not None
    if model.spec.fingerprint not in (spec.fingerprint, declared_fingerprint(folder)):
        raise CheckpointError(f"the weights in {folder} differ from those registered as '{model.name}'")


def _variant(model: Model, base: Model | None, limits: Limits, growing: Growing) -> Model:
    if base is None or base.spec is None:
        raise errors.ModelNotFound(f"the base '{model.base}' is no longer registered", param="base")
    folder = _adapter_folder(model, limits)
    manifest = read_manifest(folder, base.spec, VariantLimits(limits.max_lora_rank))
    growing(sum(file.size_bytes for file in manifest.files))
    verify_data(manifest)
    spec = replace(manifest.spec, held=held_bytes(manifest))
    reason = f"{_described(spec)} on {', '.join(spec.target_modules) or 'no module'}, fits '{base.name}'"
    if own := own_words(folder, Path(base.path or ""), base.spec.vocab_size):
        reason += f"; answers with its own {', '.join(own)}"
    model = replace(model, chat=_variant_chat(folder, base))
    if model.delta is not None and model.delta.artifact is not None:
        reason += f"; {_made(model.delta.artifact)}"
    elif (quality := _measured(folder)) is not None:
        reason += f"; according to {DELTA}, it {_keeps(quality)}"
        model = replace(model, compression=accuracy.registered(model.compression, quality))
    return replace(model, phase=Phase.READY, path=str(folder), variant_spec=spec, reason=reason)


def _adapter_folder(model: Model, limits: Limits) -> Path:
    if (fetched := fetching.fetched_of(model, model.adapter or "")) is not None:
        return sources.require_folder(Path(fetched.folder), limits.roots, "adapter")
    source = sources.parse(model.adapter or "", limits.roots, "adapter")
    if isinstance(source, sources.BundledSource):
        raise errors.InvalidRequest(
            "Ostinato has no bundled adapters; give the adapter's folder", param="adapter"
        )
    return sources.require_folder(source, limits.roots, "adapter")


def _variant_chat(folder: Path, base: Model) -> ChatFormat:
    where = Path(base.path or "")
    if not is_file(where / "config.json"):
        return variant_format("", "", base.chat or ChatFormat())
    template, family = own_template(folder, where), family_of(where)
    return variant_format(template, family, base.chat or read_chat_format(where))


def _measured(folder: Path) -> Quality | None:
    """Accuracy measured by the author of a delta compressed elsewhere. Raises CheckpointError if
    unreadable."""
    where = folder / DELTA
    if not is_file(where):
        return None
    found = read_json(where).get("quality")
    try:
        return quality_of(found)
    except (KeyError, TypeError, ValueError) as e:
        raise CheckpointError(
            f'{where}: expected "quality" as docs/formats.md describes it, got {shown(found)}; compress the '
            'fine-tune again, or delete "quality" from the file'
        ) from e


def _made(artifact: Artifact) -> str:
    text = f"made by {artifact.method}, {artifact.ratio:.1f} times smaller than the fine-tune"
    return text if artifact.quality is None else f"{text}, {_keeps(artifact.quality)}"


def _keeps(quality: Quality) -> str:
    return f"keeps {quality.accuracy:.1f}% of its accuracy"


def _described(spec: VariantSpec) -> str:
    match spec.kind:
        case VariantKind.LORA:
            return f"LoRA of rank {spec.max_rank}"
        case VariantKind.BOFT:
            facts = spec.modules.values()
            blocks = "/".join(str(size) for size in sorted({f.block_size for f in facts}))
            return f"BOFT of {max(f.factors for f in facts)} factors, blocks of {blocks}"
        case VariantKind.SPARSE_DELTA:
            return f"2:4 sparse delta of {spec.bits[0]} bits"
        case VariantKind.SVD_DELTA:
            return f"low-rank delta of rank {spec.max_rank} in {'/'.join(map(str, spec.bits))} bits"
