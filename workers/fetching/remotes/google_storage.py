"""Folders of Google Cloud Storage, over its JSON API; google-auth finds credentials (`ostinato[gs]`).

The operator's environment alone names another endpoint (STORAGE_EMULATOR_HOST).
"""

from __future__ import annotations

import base64
import os
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Self
from urllib.parse import quote

import httpx

from workers.fetching.credentials import Credentials
from workers.fetching.messages import DENIED, NOT_FOUND, UNREADABLE, FetchError, FetchRules, Interrupted
from workers.fetching.remote_source import RemoteSource
from workers.fetching.remotes.http import SourceClient, origin_of, parts_of
from workers.fetching.remotes.interface import RemoteFile, existing, revision_of

ENDPOINT = "https://storage.googleapis.com"
SCOPE = "https://www.googleapis.com/auth/devstorage.read_only"


@dataclass(frozen=True)
class GoogleFolder:
    endpoint: str
    bucket: str
    prefix: str  # empty, or with a slash at its end
    files: Mapping[str, RemoteFile]
    client: SourceClient = field(repr=False)

    @classmethod
    def resolve(cls, source: RemoteSource, credentials: Credentials, rules: FetchRules) -> Self:
        bucket, _, folder = source.name.partition("/")
        emulator = os.environ.get("STORAGE_EMULATOR_HOST", "")
        endpoint = emulator if "://" in emulator or not emulator else f"http://{emulator}"
        url = httpx.URL(endpoint or ENDPOINT)
        token = "" if emulator else _token(credentials)
        client = SourceClient.of((url.host, *rules.private_hosts), {origin_of(url): token} if token else {})
        made = cls(str(url).rstrip("/"), bucket, f"{folder}/" if folder else "", {}, client)
        files = {file.name: file for file in made._list()}
        if not files:
            raise FetchError(NOT_FOUND, f"{source.uri} has no files; check bucket and folder")
        return cls(made.endpoint, bucket, made.prefix, files, client)

    def _list(self) -> Iterator[RemoteFile]:
        url = f"{self.endpoint}/storage/v1/b/{quote(self.bucket)}/o"
        page = ""
        while True:
            query = httpx.QueryParams({"prefix": self.prefix, **({"pageToken": page} if page else {})})
            with self.client.get(f"{url}?{query}") as response:
                body = b"".join(parts_of(response))
            answer = httpx.Response(200, content=body).json()
            for item in answer.get("items", ()):
                yield _file(item, self.prefix)
            page = answer.get("nextPageToken", "")
            if not page:
                return

    @property
    def revision(self) -> str:
        return revision_of(self.files.values())

    def names(self) -> Collection[str]:
        return self.files.keys()

    def find(self, names: Iterable[str]) -> list[RemoteFile]:
        return existing(self.files, names, f"gs://{self.bucket}/{self.prefix}")

    @contextmanager
    def read(self, file: RemoteFile, start: int) -> Iterator[tuple[int, Iterator[bytes]]]:
        """The generation in the tag: an object that was replaced meanwhile is not found."""
        path = f"/storage/v1/b/{quote(self.bucket)}/o/{quote(self.prefix + file.name, safe='')}"
        url = f"{self.endpoint}/download{path}?alt=media&generation={file.tag}"
        with self.client.get(url, start) as response:
            yield (start if response.status_code == 206 else 0), parts_of(response)


def _file(item: Mapping[str, Any], prefix: str) -> RemoteFile:
    md5 = base64.b64decode(item.get("md5Hash") or "").hex()
    name = str(item["name"]).removeprefix(prefix)
    return RemoteFile(name, int(item["size"]), tag=str(item.get("generation") or ""), md5=md5)


def _token(credentials: Credentials) -> str:
    """An access token: of the key file of a tenant, or of the installation; empty for public buckets."""
    if not credentials.gs and not credentials.own:
        return ""
    try:
        import google.auth
        from google.auth import exceptions
        from google.auth.transport.requests import Request
    except ImportError as e:
        text = "gs:// needs google-auth, which is not installed; pip install 'ostinato[gs]'"
        raise FetchError(UNREADABLE, text) from e
    try:
        if credentials.gs:
            found, _ = google.auth.load_credentials_from_file(credentials.gs, scopes=[SCOPE])
        else:
            found, _ = google.auth.default(scopes=[SCOPE])
        found.refresh(Request())
    except exceptions.TransportError as e:
        raise Interrupted(f"Google's accounts do not answer: {type(e).__name__}") from None
    except exceptions.DefaultCredentialsError:
        if credentials.gs:
            raise FetchError(DENIED, "the tenant's key file for gs:// cannot be read; check it") from None
        return ""
    except exceptions.GoogleAuthError:
        raise FetchError(DENIED, "Google refuses the credentials for gs://; check them") from None
    return str(found.token)
