"""Folders of web servers and buckets, URIs, the allow-list, and addresses that no source may have."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from testkit.hub import HubStandIn, Repository, serving
from workers.fetching.credentials import credentials_of
from workers.fetching.messages import LINES, Failed, Fetched, FetchError, FetchRequest, FetchRules
from workers.fetching.process import carry_out, fetch_environment
from workers.fetching.remote_source import SourceKind, is_allowed, parse_remote
from workers.fetching.remotes import http
from workers.fetching.remotes.http import is_public, public_address

MODEL: dict[str, Path | bytes] = {
    "config.json": b"{}",
    "tokenizer.json": b"{}",
    "model.safetensors": bytes(range(256)) * 2000,
    "pytorch_model.bin": b"other",
}
HERE = FetchRules(retries=2, pause_s=0.01, private_hosts=("127.0.0.1",))


@pytest.fixture
def web() -> Iterator[HubStandIn]:
    with serving(HubStandIn({"model": Repository(MODEL)})) as server:
        yield server


def last(uri: str, tmp_path: Path, **rest: Any) -> Fetched | Failed:
    request = FetchRequest(uri=uri, parent=tmp_path / "fetched", **{"rules": HERE, **rest})
    line = LINES.validate_json(list(carry_out(request))[-1])
    assert isinstance(line, Fetched | Failed)
    return line


def test_a_web_servers_folder_is_fetched_and_goes_on_after_a_cut(web: HubStandIn, tmp_path: Path) -> None:
    cuts = iter([True])
    web.cut = lambda file, sent: file == "model.safetensors" and sent == 131072 and next(cuts, False)
    result = last(f"{web.url}/plain/model", tmp_path)
    assert isinstance(result, Fetched), result
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        assert (result.folder / name).read_bytes() == MODEL[name]
    assert not (result.folder / "pytorch_model.bin").exists()
    assert any(asked.startswith("bytes=") for *_, asked in web.requests)


def test_a_web_folder_that_changed_since_it_was_registered_is_refused(
    web: HubStandIn, tmp_path: Path
) -> None:
    first = last(f"{web.url}/plain/model", tmp_path)
    assert isinstance(first, Fetched)
    web.repositories["model"] = Repository({**MODEL, "model.safetensors": b"changed" * 99})
    (first.folder / "model.safetensors").unlink()
    again = last(f"{web.url}/plain/model", tmp_path, revision=first.revision, digest=first.digest)
    assert isinstance(again, Failed)
    assert again.code == "wrong_digest"


def test_a_web_server_on_a_private_address_needs_the_operators_word(web: HubStandIn, tmp_path: Path) -> None:
    result = last(f"{web.url}/plain/model", tmp_path, rules=FetchRules())
    assert isinstance(result, Failed)
    assert result.code == "source_not_allowed"


def test_a_tenants_token_opens_its_web_folder(web: HubStandIn, tmp_path: Path) -> None:
    web.repositories["model"] = Repository(MODEL, readers=frozenset({"open"}))
    file = tmp_path / "credentials.yaml"
    file.write_text(f"acme: {{https: {{'{web.url.removeprefix('http://')}': open}}}}\n")
    rules = FetchRules(private_hosts=("127.0.0.1",), credentials=str(file))
    assert isinstance(last(f"{web.url}/plain/model", tmp_path, tenant="acme", rules=rules), Fetched)
    refused = last(f"{web.url}/plain/model", tmp_path, tenant="other", rules=rules)
    assert isinstance(refused, Failed)
    assert refused.code == "source_denied"


@pytest.mark.parametrize(
    ("uri", "kind", "name", "revision"),
    [
        ("org/name", SourceKind.HUB, "org/name", ""),
        ("org/name@v1.0", SourceKind.HUB, "org/name", "v1.0"),
        ("hf://gpt2", SourceKind.HUB, "gpt2", ""),
        ("hf://org/name@refs/pr/3", SourceKind.HUB, "org/name", "refs/pr/3"),
        ("s3://bucket/a/b/", SourceKind.S3, "bucket/a/b", ""),
        ("gs://bucket", SourceKind.GS, "bucket", ""),
        ("https://host:8443/a", SourceKind.HTTPS, "host:8443/a", ""),
    ],
)
def test_uris_name_sources(uri: str, kind: SourceKind, name: str, revision: str) -> None:
    source = parse_remote(uri)
    assert source is not None
    assert (source.kind, source.name, source.revision) == (kind, name, revision)


@pytest.mark.parametrize("uri", ["/a/b", "file:///a/b", "bundled://x", "ftp://a/b", "name", "a/b/c"])
def test_other_locations_are_not_remote(uri: str) -> None:
    assert parse_remote(uri) is None


@pytest.mark.parametrize(
    "uri",
    [
        "hf://a/b/c",
        "hf://org/name@../x",
        "s3://bucket/../other",
        "s3://B!/x",
        "https://user:password@host/x",
        "https://host/x?signature=1",
        "https:///x",
        "https://host/../x",
    ],
)
def test_a_uri_that_is_no_plain_source_is_refused(uri: str) -> None:
    with pytest.raises(ValueError, match="expected"):
        parse_remote(uri)


@pytest.mark.parametrize(
    ("uri", "allowed", "answer"),
    [
        ("org/name", ("hf",), True),
        ("org/name", ("s3", "hf://org/"), True),
        ("org2/name", ("hf://org",), False),
        ("org/name@v1", ("hf://org/name",), True),
        ("org/names", ("hf://org/name",), False),
        ("s3://bucket-of-others/x", ("s3://bucket",), False),
        ("https://host/x", (), False),
    ],
)
def test_the_list_of_sources_decides(uri: str, allowed: tuple[str, ...], answer: bool) -> None:
    source = parse_remote(uri)
    assert source is not None
    assert is_allowed(source, allowed) is answer


@pytest.mark.parametrize(
    "address",
    [
        *("127.0.0.1", "10.1.2.3", "192.168.0.1", "172.16.0.1", "169.254.169.254", "100.64.0.1", "0.0.0.0"),
        *(
            "::1",
            "::",
            "fe80::1%eth0",
            "fc00::1",
            "::ffff:127.0.0.1",
            "64:ff9b::a00:1",
            "2002:7f00:1::",
            "224.0.0.1",
        ),
    ],
)
def test_addresses_that_are_not_public(address: str) -> None:
    assert not is_public(address)


@pytest.mark.parametrize("address", ["8.8.8.8", "2606:4700:4700::1111", "64:ff9b::808:808"])
def test_public_addresses(address: str) -> None:
    assert is_public(address)


def test_a_name_with_one_private_address_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def look_up(host: str, port: int, **_: object) -> list[Any]:
        return [(socket.AF_INET, socket.SOCK_STREAM, 0, "", (ip, port)) for ip in ("8.8.8.8", "10.0.0.1")]

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    with pytest.raises(FetchError, match="not public"):
        public_address("rebinds.example", 443)


def test_the_address_that_was_checked_is_the_one_that_is_used(
    web: HubStandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A name is looked up once: the second answer of a rebinding server is never asked for."""
    asked: list[str] = []

    def look_up(host: str, port: int) -> str:
        asked.append(host)
        return "127.0.0.1"

    monkeypatch.setattr(http, "public_address", look_up)
    client = http.SourceClient.of(())
    port = httpx.URL(web.url).port
    with client.get(f"http://rebinds.example:{port}/plain/model/config.json") as response:
        assert response.headers["Content-Length"] == "2"
    assert asked == ["rebinds.example"]


def test_a_tenants_fetch_has_none_of_the_installations_credentials(tmp_path: Path) -> None:
    environment = {
        **{"HF_TOKEN": "a", "AWS_SECRET_ACCESS_KEY": "b", "GOOGLE_APPLICATION_CREDENTIALS": "c"},
        **{"OSTINATO_API_KEY": "d", "HF_ENDPOINT": "e", "PATH": "f"},
    }
    own, tenants = (fetch_environment(environment, own=own) for own in (True, False))
    assert {name for name in environment if name in own} == environment.keys() - {"OSTINATO_API_KEY"}
    assert {name for name in environment if name in tenants} == {"HF_ENDPOINT", "PATH"}


def test_a_file_of_credentials_that_cannot_be_read_is_not_quoted(tmp_path: Path) -> None:
    file = tmp_path / "credentials.yaml"
    file.write_text("acme: [secret")
    with pytest.raises(FetchError) as failure:
        credentials_of("acme", str(file))
    assert "secret" not in failure.value.message
