"""Buckets: S3 with boto3 against moto's server, Google Cloud Storage against a stand-in of its JSON API."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import pytest

from workers.fetching.messages import LINES, Failed, Fetched, FetchRequest, FetchRules
from workers.fetching.process import carry_out

MODEL = {
    "config.json": b"{}",
    "tokenizer.json": b"{}",
    "model.safetensors": bytes(range(256)) * 2000,
    "pytorch_model.bin": b"other",
}
WANTED = ("config.json", "model.safetensors", "tokenizer.json")


def last(uri: str, tmp_path: Path, **rest: Any) -> Fetched | Failed:
    rules = FetchRules(retries=1, pause_s=0.01)
    request = FetchRequest(uri=uri, parent=tmp_path / "fetched", **{"rules": rules, **rest})
    line = LINES.validate_json(list(carry_out(request))[-1])
    assert isinstance(line, Fetched | Failed)
    return line


def contents(folder: Path) -> dict[str, bytes]:
    return {
        path.name: path.read_bytes() for path in folder.iterdir() if path.is_file() and path.name[0] != "."
    }


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Any]:
    boto3 = pytest.importorskip("boto3")
    server = pytest.importorskip("moto.server").ThreadedMotoServer(port=0)
    server.start()
    _, port = server.get_host_and_port()
    for name, value in {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_DEFAULT_REGION": "us-east-1",
        "HOME": str(tmp_path),
    }.items():
        monkeypatch.setenv(name, value)
    client = boto3.client("s3")
    client.create_bucket(Bucket="models")
    for name, data in MODEL.items():
        client.put_object(Bucket="models", Key=f"team/small/{name}", Body=data)
    yield client
    server.stop()


def test_a_folder_of_s3_is_fetched(s3: Any, tmp_path: Path) -> None:
    result = last("s3://models/team/small", tmp_path)
    assert isinstance(result, Fetched), result
    assert contents(result.folder) == {name: MODEL[name] for name in WANTED}


def test_a_part_of_an_object_is_completed(s3: Any, tmp_path: Path) -> None:
    result = last("s3://models/team/small", tmp_path)
    assert isinstance(result, Fetched), result
    weights, part = result.folder / "model.safetensors", result.folder / ".ostinato-parts/model.safetensors"
    part.write_bytes(weights.read_bytes()[:100_000])
    weights.unlink()
    again = last("s3://models/team/small", tmp_path, revision=result.revision, digest=result.digest)
    assert again == result
    assert weights.read_bytes() == MODEL["model.safetensors"]


def test_an_object_that_differs_from_its_checksum_is_named(s3: Any, tmp_path: Path) -> None:
    """A part that another object left: the MD5 in the ETag does not fit, twice."""
    first = last("s3://models/team/small", tmp_path)
    assert isinstance(first, Fetched)
    s3.put_object(Bucket="models", Key="team/small/model.safetensors", Body=b"changed")
    changed = last("s3://models/team/small", tmp_path, revision=first.revision, digest="0" * 64)
    assert isinstance(changed, Failed)
    assert changed.code == "wrong_digest"


@pytest.mark.parametrize("uri", ["s3://absent/team", "s3://models/absent"])
def test_a_bucket_or_folder_that_does_not_exist_is_named(s3: Any, tmp_path: Path, uri: str) -> None:
    result = last(uri, tmp_path)
    assert isinstance(result, Failed)
    assert result.code == "source_not_found"


def test_the_digests_of_s3() -> None:
    pytest.importorskip("boto3")
    from workers.fetching.remotes.interface import RemoteFile
    from workers.fetching.remotes.s3 import with_digest_of

    file, md5 = RemoteFile("x", 3), hashlib.md5(b"abc", usedforsecurity=False).hexdigest()
    whole = base64.b64encode(hashlib.sha256(b"abc").digest()).decode()
    assert with_digest_of(file, {"ETag": f'"{md5}"'}).md5 == md5
    assert with_digest_of(file, {"ETag": f'"{md5}-2"'}).md5 == ""
    assert with_digest_of(file, {"ETag": f'"{md5}"', "ServerSideEncryption": "aws:kms"}).md5 == ""
    assert with_digest_of(file, {"ChecksumSHA256": whole}).sha256 == hashlib.sha256(b"abc").hexdigest()
    assert with_digest_of(file, {"ChecksumSHA256": f"{whole}-2"}).sha256 == ""


class _Google(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    refused = False
    ranges: list[str] = []  # noqa: RUF012

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        parts = urlsplit(self.path)
        query = parse_qs(parts.query)
        if self.refused:
            self._send(403, b"")
        elif re.fullmatch(r"/storage/v1/b/models/o", parts.path):
            prefix, after = query["prefix"][0], query.get("pageToken", [""])[0]
            names = [name for name in sorted(MODEL) if name > after and prefix == "team/small/"]
            page = {"items": [_item(name) for name in names[:2]]}
            more = {"nextPageToken": names[1]} if len(names) > 2 else {}
            self._send(200, json.dumps(page | more if names else {}).encode())
        elif found := re.fullmatch(r"/download/storage/v1/b/models/o/(.+)", parts.path):
            assert query == {"alt": ["media"], "generation": ["7"]}
            data = MODEL[unquote(found[1]).removeprefix("team/small/")]
            asked = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
            self.ranges.append(self.headers.get("Range", ""))
            self._send(206 if asked else 200, data[int(asked[1]) :] if asked else data)
        else:
            self._send(404, b"")

    def _send(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def _item(name: str) -> dict[str, str]:
    md5 = base64.b64encode(hashlib.md5(MODEL[name], usedforsecurity=False).digest()).decode()
    return {"name": f"team/small/{name}", "size": str(len(MODEL[name])), "generation": "7", "md5Hash": md5}


@pytest.fixture
def google(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[_Google]]:
    handler = type("Handler", (_Google,), {"ranges": []})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", f"http://127.0.0.1:{server.server_address[1]}")
    yield handler
    server.shutdown()
    server.server_close()


def test_a_folder_of_google_cloud_storage_is_fetched_and_completed(
    google: type[_Google], tmp_path: Path
) -> None:
    result = last("gs://models/team/small", tmp_path)
    assert isinstance(result, Fetched), result
    assert contents(result.folder) == {name: MODEL[name] for name in WANTED}
    weights, part = result.folder / "model.safetensors", result.folder / ".ostinato-parts/model.safetensors"
    part.write_bytes(weights.read_bytes()[:1000])
    weights.unlink()
    assert last("gs://models/team/small", tmp_path, revision=result.revision, digest=result.digest) == result
    assert google.ranges[-1] == "bytes=1000-"


def test_a_refusal_of_google_cloud_storage_is_named(google: type[_Google], tmp_path: Path) -> None:
    absent = last("gs://models/absent", tmp_path)
    google.refused = True
    refused = last("gs://models/team/small", tmp_path)
    assert isinstance(absent, Failed)
    assert isinstance(refused, Failed)
    assert (absent.code, refused.code) == ("source_not_found", "source_denied")
