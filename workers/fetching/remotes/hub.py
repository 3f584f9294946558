"""A model hub that speaks Hugging Face's API: the public one, or a mirror that HF_ENDPOINT names.

huggingface_hub lists the files and finds the installation's token. The bytes come over our own client: the
library's downloads begin again from 0 after a kill, and check sizes only.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Self
from urllib.parse import quote

import httpx

from workers.fetching.credentials import Credentials
from workers.fetching.messages import DENIED, NOT_FOUND, UNREADABLE, FetchError, FetchRules, Interrupted
from workers.fetching.remote_source import RemoteSource
from workers.fetching.remotes.http import SourceClient, origin_of, parts_of
from workers.fetching.remotes.interface import RemoteFile, existing

LIST_S = 30.0


@dataclass(frozen=True)
class Hub:
    """A repository at one commit."""

    repository: str
    revision: str
    endpoint: str
    files: Mapping[str, RemoteFile]
    client: SourceClient = field(repr=False)

    @classmethod
    def resolve(cls, source: RemoteSource, credentials: Credentials, rules: FetchRules) -> Self:
        from huggingface_hub import HfApi, constants, get_token

        endpoint = constants.ENDPOINT
        token = credentials.hub or (get_token() if credentials.own else None)
        try:
            api = HfApi(endpoint=endpoint, token=token or False)
            info = api.model_info(
                source.name, revision=source.revision or None, files_metadata=True, timeout=LIST_S
            )
        except Exception as e:
            raise _named(e, source, endpoint, has_token=bool(token)) from None  # its text may quote headers
        files = {
            sibling.rfilename: RemoteFile(
                name=sibling.rfilename,
                size_bytes=sibling.lfs.size if sibling.lfs else sibling.size or 0,
                tag=sibling.lfs.sha256 if sibling.lfs else sibling.blob_id or "",
                sha256=sibling.lfs.sha256 if sibling.lfs else "",
                git_sha1="" if sibling.lfs else sibling.blob_id or "",
            )
            for sibling in info.siblings or ()
        }
        url = httpx.URL(endpoint)
        tokens = {origin_of(url): token} if token else {}
        client = SourceClient.of((url.host, *rules.private_hosts), tokens)
        return cls(source.name, info.sha or "", endpoint, files, client)

    def names(self) -> Collection[str]:
        return self.files.keys()

    def find(self, names: Iterable[str]) -> list[RemoteFile]:
        return existing(self.files, names, f"'{self.repository}'")

    @contextmanager
    def read(self, file: RemoteFile, start: int) -> Iterator[tuple[int, Iterator[bytes]]]:
        url = f"{self.endpoint}/{self.repository}/resolve/{self.revision}/{quote(file.name)}"
        with self.client.get(url, start) as response:
            yield (start if response.status_code == 206 else 0), parts_of(response)


def _named(
    error: Exception, source: RemoteSource, endpoint: str, has_token: bool
) -> FetchError | Interrupted:
    """The cause of a failed listing. The text of `error` may quote headers, so it is not used."""
    from huggingface_hub import errors as hub

    where, host = f"'{source.name}' on {httpx.URL(endpoint).host}", httpx.URL(endpoint).host
    advice = (
        "use a token of an account that has access" if has_token else "set HF_TOKEN, or the tenant's token"
    )
    status = error.response.status_code if isinstance(error, hub.HfHubHTTPError) else 0
    found = Interrupted(f"{host} does not answer: {type(error).__name__}") if not status else None
    match error:
        case hub.OfflineModeIsEnabled():
            text = "HF_HUB_OFFLINE is set for Ostinato; unset it and start again"
            return FetchError(UNREADABLE, text)
        case hub.HFValidationError():
            return FetchError(UNREADABLE, f"expected a name of the hub, got '{source.name}'")
        case hub.RevisionNotFoundError():
            text = f"{where} has no revision '{source.revision}'; name a branch, tag or commit"
            return FetchError(NOT_FOUND, text)
    return found or _by_status(status, where, host, advice)


def _by_status(status: int, where: str, host: str, advice: str) -> FetchError | Interrupted:
    if status in (401, 403):
        return FetchError(
            DENIED,
            f"{where} is private or gated, or does not exist; check the name, accept its terms there, and "
            f"{advice}",
        )
    if status == 404:
        return FetchError(NOT_FOUND, f"{where} does not exist; check the name")
    if status in (408, 429) or status >= 500:
        return Interrupted(f"{host} answers with status {status}")
    return FetchError(UNREADABLE, f"{where} is answered with status {status}; check the name")
