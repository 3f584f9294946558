"""Which models need files from a remote source, and what is asked of the process that fetches them. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from controlplane import errors
from controlplane.settings import Settings
from controlplane.state.records import FetchedSource, Model, Phase
from controlplane.state.repository import State
from workers.fetching.messages import Failed, Fetched, FetchRequest, FetchRules, Progress, Wanted
from workers.fetching.remote_source import is_allowed, parse_remote

_GIB = 1 << 30
_IN_USE = (Phase.PENDING, Phase.PROFILING, Phase.COMPRESSING)


def remote_uri(model: Model) -> str:
    """The remote source of the files that the model consists of; empty if they lie in a folder or a package.

    Errors: InvalidRequest for a URI of a remote source that cannot be read.
    """
    uri = _uri(model)
    try:
        return uri if parse_remote(uri) is not None else ""
    except ValueError as e:
        raise errors.InvalidRequest(str(e), param=_param(model)) from e


def _uri(model: Model) -> str:
    """A fine-tune that was compressed consists of its delta, which was made here."""
    return (model.adapter if model.is_variant and model.adapter else model.source) or ""


def _param(model: Model) -> str:
    return "adapter" if model.is_variant and model.adapter else "source"


def fetch_request(state: State, model: Model, settings: Settings) -> FetchRequest | None:
    """What to fetch for a model; None if nothing. Errors: InvalidRequest, SourceNotAllowed."""
    uri = remote_uri(model)
    source = parse_remote(uri) if uri else None
    if source is None:
        return None
    if not is_allowed(source, settings.allowed_sources):
        raise errors.SourceNotAllowed(
            f"'{source.uri}' is not a source that this installation fetches from "
            f"({settings.sources or 'none'}); "
            "download it into an allowed folder, or add it to OSTINATO_SOURCES and start Ostinato again",
            param=_param(model),
        )
    known = fetched_of(model, uri)
    return FetchRequest(
        uri=uri,
        parent=settings.fetched_folder,
        wanted=Wanted.ADAPTER if _param(model) == "adapter" else Wanted.MODEL,
        tenant=model.tenant,
        revision=known.revision if known else "",
        digest=known.digest if known else "",
        kept=tuple(kept_folders(state)),
        rules=FetchRules(
            budget_bytes=settings.source_bytes,
            private_hosts=settings.private_hosts,
            credentials=settings.source_credentials,
        ),
    )


def fetched_of(model: Model, uri: str) -> FetchedSource | None:
    """How `uri` was fetched for this model; None if it was not."""
    return model.fetched if model.fetched is not None and model.fetched.uri == uri else None


def kept_folders(state: State) -> Iterator[str]:
    """The fetched folders in use: of what is deployed, and of what is being registered or compressed."""
    for versioned in state.models.values():
        model = versioned.record
        if model.fetched is not None and _in_use(state, model):
            yield model.fetched.folder


def _in_use(state: State, model: Model) -> bool:
    if model.name in state.deployments or model.phase in _IN_USE:
        return True
    return any(variant.phase in _IN_USE for variant in state.variants_of(model.name))


def as_fetched(uri: str, fetched: Fetched) -> FetchedSource:
    return FetchedSource(uri, str(fetched.folder), fetched.revision, fetched.digest, fetched.size_bytes)


def as_error(failed: Failed, model: Model) -> errors.OstinatoError:
    return errors.error_from_body({"code": failed.code, "message": failed.message, "param": _param(model)})


def described(progress: Progress) -> str:
    if progress.note:
        return f"fetching: {progress.note}"
    if not progress.total_bytes:
        return "fetching: listing the files"
    return f"fetching: {progress.done_bytes / _GIB:.2f} of {progress.total_bytes / _GIB:.2f} GiB"


def share(progress: Progress) -> float:
    return progress.done_bytes / progress.total_bytes if progress.total_bytes else 0.0
