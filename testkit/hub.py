"""A model hub on loopback, with the parts of Hugging Face's API that huggingface_hub and our fetches use.

It answers `model_info`, and `resolve` with redirects to a storage path, ranges, ETag, X-Repo-Commit,
X-Linked-Etag and X-Error-Code, in the form that the public hub has.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import parse_qs, unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"
PART_BYTES = 1 << 16
LFS_SUFFIXES = (".safetensors", ".bin", ".gguf", ".h5", ".msgpack", ".model")


@dataclass
class Repository:
    """Files at one commit. `readers` are the tokens that may read it; None: all may. `gated`: it is listed
    for all, and only readers get its files. `damaged` files arrive with another first byte."""

    files: Mapping[str, Path | bytes]
    commit: str = COMMIT
    readers: frozenset[str] | None = None
    gated: bool = False
    damaged: frozenset[str] = frozenset()

    @classmethod
    def of(cls, folder: Path, **rest: Any) -> Repository:
        paths = (path for path in folder.rglob("*") if path.is_file())
        return cls({str(path.relative_to(folder)): path for path in paths}, **rest)


@dataclass
class HubStandIn:
    """`requests` are those that came: method, path, Authorization, Range. `cut` decides by path and number of
    bytes sent so far whether a connection breaks off. `bytes_per_s` slows each connection."""

    repositories: dict[str, Repository] = field(default_factory=dict)
    url: str = ""
    requests: list[tuple[str, str, str, str]] = field(default_factory=list)
    cut: Callable[[str, int], bool] = lambda path, sent: False
    storage: str = ""  # another origin for files in LFS
    redirect: str = ""  # a URL to which every file redirects
    bytes_per_s: float = 0.0
    status: int = 0  # answer everything with this status

    def paths(self, method: str = "GET") -> list[str]:
        return [path for sent, path, _, _ in self.requests if sent == method]


@contextmanager
def serving(hub: HubStandIn | None = None, host: str = "127.0.0.1") -> Iterator[HubStandIn]:
    hub = hub or HubStandIn()
    handler = type("Handler", (_Handler,), {"hub": hub})
    server = ThreadingHTTPServer((host, 0), handler)
    server.daemon_threads = True
    hub.url = f"http://{host}:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    hub: ClassVar[HubStandIn]
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        path = unquote(urlsplit(self.path).path)
        headers = self.headers
        self.hub.requests.append(
            (self.command, path, headers.get("Authorization", ""), headers.get("Range", ""))
        )
        if self.hub.status:
            self._refuse(self.hub.status, "", "the hub is not well")
        elif found := re.fullmatch(r"/api/models/(.+?)(?:/revision/(.+))?", path):
            self._info(found[1], found[2])
        elif found := re.fullmatch(r"/(.+)/resolve/([^/]+)/(.+)", path):
            self._resolve(found[1], found[2], found[3])
        elif found := re.fullmatch(r"/storage/(.+)@(.+?)/(.+)", path):
            self._send_file(self.hub.repositories[found[1]], found[3], {})
        elif found := re.fullmatch(r"/plain/(.+?)/([^/]+)", path):
            self._plain(found[1], found[2])
        else:
            self._refuse(404, "", "Not Found")

    def _repository(self, name: str, revision: str | None) -> Repository | None:
        """The repository, after its rules; None if the answer was a refusal."""
        repository = self.hub.repositories.get(name)
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        hidden = repository is not None and not repository.gated and self._is_closed(repository, token)
        if repository is None or hidden:
            # The public hub, too, tells a client without a token only that a repository may not exist.
            self._refuse(404 if token else 401, "RepoNotFound", "Repository not found")
            return None
        if revision not in (None, "main", repository.commit):
            self._refuse(404, "RevisionNotFound", f"Invalid rev id: {revision}")
            return None
        return repository

    def _is_closed(self, repository: Repository, token: str) -> bool:
        return repository.readers is not None and token not in repository.readers

    def _info(self, name: str, revision: str | None) -> None:
        repository = self._repository(name, revision)
        if repository is None:
            return
        blobs = "blobs" in parse_qs(urlsplit(self.path).query)
        siblings = [_sibling(file, content, blobs) for file, content in sorted(repository.files.items())]
        body = {"id": name, "modelId": name, "sha": repository.commit, "siblings": siblings, "tags": []}
        self._send(200, json.dumps(body).encode(), {"Content-Type": "application/json"})

    def _resolve(self, name: str, revision: str, file: str) -> None:
        repository = self._repository(name, revision)
        if repository is None:
            return
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        if repository.gated and self._is_closed(repository, token):
            self._refuse(403, "GatedRepo", "Access to this model is restricted")
            return
        content = repository.files.get(file)
        if content is None:
            self._refuse(404, "EntryNotFound", "Entry not found")
            return
        if self.hub.redirect:
            self._send(302, b"", {"Location": self.hub.redirect})
            return
        common = {"X-Repo-Commit": repository.commit}
        if not file.endswith(LFS_SUFFIXES):
            self._send_file(repository, file, common | {"ETag": f'"{git_sha1(_bytes(content))}"'})
            return
        where = (
            f"{self.hub.storage or self.hub.url}/storage/{name}@{repository.commit}/{file}?X-Signature=secret"
        )
        linked = {"X-Linked-Etag": f'"{sha256(content)}"', "X-Linked-Size": str(_size(content))}
        self._send(302, b"", common | linked | {"Location": where})

    def _plain(self, name: str, file: str) -> None:
        """A plain web server's folder."""
        repository = self.hub.repositories[name]
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        if self._is_closed(repository, token):
            self._refuse(403, "", "Forbidden")
        elif file not in repository.files:
            self._refuse(404, "", "Not Found")
        else:
            self._send_file(repository, file, {"ETag": f'"{sha256(repository.files[file])[:20]}"'})

    def _send_file(self, repository: Repository, file: str, headers: dict[str, str]) -> None:
        content = repository.files[file]
        size, asked = _size(content), re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
        start = int(asked[1]) if asked else 0
        if start >= size > 0:
            self._send(416, b"", headers | {"Content-Range": f"bytes */{size}"})
            return
        self.send_response(206 if asked else 200)
        for name, value in headers.items():
            self.send_header(name, value)
        if asked:
            self.send_header("Content-Range", f"bytes {start}-{size - 1}/{size}")
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("Content-Length", str(size - start))
        self.end_headers()
        if self.command == "HEAD":
            return
        sent = start
        for part in _parts(content, start):
            if self.hub.cut(file, sent):
                self.wfile.flush()
                self.connection.close()
                return
            flipped = bytes([part[0] ^ 255]) + part[1:] if sent == 0 and file in repository.damaged else part
            try:
                self.wfile.write(flipped)
            except OSError:
                return
            sent += len(part)
            if self.hub.bytes_per_s:
                time.sleep(len(part) / self.hub.bytes_per_s)

    def _refuse(self, status: int, code: str, message: str) -> None:
        headers = {"X-Error-Message": message} | ({"X-Error-Code": code} if code else {})
        self._send(status, json.dumps({"error": message}).encode(), headers)

    def _send(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


def _sibling(name: str, content: Path | bytes, blobs: bool) -> dict[str, Any]:
    if not blobs:
        return {"rfilename": name}
    if not name.endswith(LFS_SUFFIXES):
        return {"rfilename": name, "size": _size(content), "blobId": git_sha1(_bytes(content))}
    lfs = {"sha256": sha256(content), "size": _size(content), "pointerSize": 134}
    return {"rfilename": name, "size": _size(content), "blobId": "0" * 40, "lfs": lfs}


_DIGESTS: dict[tuple[str, int, int], str] = {}


def sha256(content: Path | bytes) -> str:
    if isinstance(content, bytes):
        return hashlib.sha256(content).hexdigest()
    seen = content.stat()
    key = (str(content), seen.st_mtime_ns, seen.st_size)
    if key not in _DIGESTS:
        with content.open("rb") as file:
            _DIGESTS[key] = hashlib.file_digest(file, "sha256").hexdigest()
    return _DIGESTS[key]


def git_sha1(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()


def _bytes(content: Path | bytes) -> bytes:
    return content if isinstance(content, bytes) else content.read_bytes()


def _size(content: Path | bytes) -> int:
    return len(content) if isinstance(content, bytes) else content.stat().st_size


def _parts(content: Path | bytes, start: int) -> Iterator[bytes]:
    if isinstance(content, bytes):
        yield from (content[at : at + PART_BYTES] for at in range(start, len(content), PART_BYTES))
        return
    with content.open("rb") as file:
        file.seek(start)
        while part := file.read(PART_BYTES):
            yield part
