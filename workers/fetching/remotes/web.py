"""A folder of a web server. It cannot be listed, so the names of a model's files are tried."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Self
from urllib.parse import quote

import httpx

from workers.fetching.credentials import Credentials
from workers.fetching.messages import DENIED, NOT_ALLOWED, NOT_FOUND, UNREADABLE, FetchError, FetchRules
from workers.fetching.remote_source import RemoteSource, SourceKind
from workers.fetching.remotes.http import SourceClient, origin_of, parts_of
from workers.fetching.remotes.interface import RemoteFile, revision_of
from workers.fetching.wanted_files import KNOWN_NAMES


@dataclass(frozen=True)
class WebFolder:
    url: str
    files: Mapping[str, RemoteFile]
    client: SourceClient = field(repr=False)

    @classmethod
    def resolve(cls, source: RemoteSource, credentials: Credentials, rules: FetchRules) -> Self:
        url = httpx.URL(f"{source.kind}://{quote(source.name, safe='/:[]')}")
        if source.kind is SourceKind.HTTP and url.host.lower() not in rules.private_hosts:
            raise FetchError(
                NOT_ALLOWED,
                f"expected https://, because '{url.host}' is not one of OSTINATO_SOURCE_PRIVATE_HOSTS",
            )
        tokens = {
            origin_of(url): token for host, token in credentials.web.items() if host == url.netloc.decode()
        }
        client = SourceClient.of(rules.private_hosts, tokens)
        folder = cls(str(url), {}, client)
        files = {name: file for name in KNOWN_NAMES if (file := folder._look(name)) is not None}
        if not files:
            with client.get(f"{url}/config.json", method="HEAD"):  # raises the reason
                pass
        return cls(str(url), files, client)

    @property
    def revision(self) -> str:
        return revision_of(self.files.values())

    def names(self) -> Collection[str]:
        return self.files.keys()

    def find(self, names: Iterable[str]) -> list[RemoteFile]:
        found = []
        for name in names:
            file = self.files.get(name) or self._look(name)
            if file is None:
                raise FetchError(
                    NOT_FOUND, f"{self.url}/{name} does not exist; copy all of the model's files there"
                )
            found.append(file)
        return found

    @contextmanager
    def read(self, file: RemoteFile, start: int) -> Iterator[tuple[int, Iterator[bytes]]]:
        with self.client.get(self._url(file.name), start) as response:
            yield (start if response.status_code == 206 else 0), parts_of(response)

    def _look(self, name: str) -> RemoteFile | None:
        try:
            with self.client.get(self._url(name), method="HEAD") as response:
                size = response.headers.get("Content-Length", "")
                tag = response.headers.get("ETag", "") or response.headers.get("Last-Modified", "")
        except FetchError as e:
            if e.code in (NOT_FOUND, DENIED):
                return None
            raise
        if not size.isdecimal():
            raise FetchError(
                UNREADABLE, f"{self.url}/{name}: expected a Content-Length, found none; use another server"
            )
        return RemoteFile(name, int(size), tag)

    def _url(self, name: str) -> str:
        return f"{self.url}/{quote(name)}"
