"""The clients of each kind of source behind one interface (`interface.py`)."""

from __future__ import annotations

from workers.fetching.credentials import Credentials
from workers.fetching.messages import FetchRules
from workers.fetching.remote_source import RemoteSource, SourceKind
from workers.fetching.remotes.interface import Remote


def open_remote(source: RemoteSource, credentials: Credentials, rules: FetchRules) -> Remote:
    """The files of a source. Errors: FetchError, Interrupted."""
    match source.kind:
        case SourceKind.HUB:
            from workers.fetching.remotes.hub import Hub

            return Hub.resolve(source, credentials, rules)
        case SourceKind.S3:
            from workers.fetching.remotes.s3 import S3Folder

            return S3Folder.resolve(source, credentials)
        case SourceKind.GS:
            from workers.fetching.remotes.google_storage import GoogleFolder

            return GoogleFolder.resolve(source, credentials, rules)
        case SourceKind.HTTPS | SourceKind.HTTP:
            from workers.fetching.remotes.web import WebFolder

            return WebFolder.resolve(source, credentials, rules)
