"""Requests as clients send them: from pages of other origins, with HEAD, packed, under other paths."""

from __future__ import annotations

import gzip
import json
import zlib
from typing import Any

import httpx
import pytest

from testkit.api.installations import Installation, Start

PAGE = "https://chat.example.com"
KEY = "secret"
BODY = {"model": "base", "prompt": "hello", "max_tokens": 3}
PREFLIGHT = {
    "Origin": PAGE,
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization,content-type",
}


@pytest.fixture(scope="module")
def keyed(start_shared: Start) -> Installation:
    """It has a key, and a page that may ask."""
    made = start_shared(api_key=KEY, cors_origins=f"{PAGE}, https://other.example.com", max_body_bytes=20_000)
    made.up("v1")
    return made


def bare(installation: Installation, method: str, path: str, **options: Any) -> httpx.Response:
    """The headers of a client without a key."""
    return httpx.request(method, installation.url + path, timeout=90, trust_env=False, **options)


# --- pages of other origins ------------------------------------------------------------------------


def test_a_preflight_answer_permits_the_page_s_request(keyed: Installation) -> None:
    """It asks without a key."""
    for path in ("/v1/chat/completions", "/v1/models", "/register_model"):
        answer = bare(keyed, "OPTIONS", path, headers=PREFLIGHT)
        assert answer.status_code == 204
        assert answer.headers["access-control-allow-origin"] == PAGE
        assert "POST" in answer.headers["access-control-allow-methods"]
        assert "authorization" in answer.headers["access-control-allow-headers"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_page_reads_its_answer(keyed: Installation, stream: bool) -> None:
    answer = keyed.post("/v1/completions", {**BODY, "stream": stream}, headers={"Origin": PAGE})
    assert answer.status_code == 200
    assert answer.headers["access-control-allow-origin"] == PAGE
    assert "Origin" in answer.headers["vary"]


def test_a_page_reads_refusals(keyed: Installation) -> None:
    """A wrong key, a wrong body, an unknown model: else a browser would only say that something failed."""
    wrong = bare(keyed, "GET", "/v1/models", headers={"Origin": PAGE})
    bad = keyed.post("/v1/completions", {"model": "nobody"}, headers={"Origin": PAGE})
    assert [(a.status_code, a.headers["access-control-allow-origin"]) for a in (wrong, bad)] == [
        (401, PAGE),
        (404, PAGE),
    ]


def test_other_pages_may_not(keyed: Installation) -> None:
    answer = bare(keyed, "OPTIONS", "/v1/models", headers={**PREFLIGHT, "Origin": "https://evil.example.com"})
    assert answer.status_code == 403
    assert "access-control-allow-origin" not in answer.headers
    assert "OSTINATO_CORS_ORIGINS" in answer.json()["error"]["message"]
    read = keyed.http.get("/v1/models", headers={"Origin": "https://evil.example.com"})
    assert "access-control-allow-origin" not in read.headers


def test_a_star_is_for_all_pages_and_without_a_setting_none_may(start: Start) -> None:
    """Where there is no key, a page that may ask need not be one of the API's own names."""
    none, everybody = start(), start(cors_origins="*")
    assert bare(none, "OPTIONS", "/v1/models", headers=PREFLIGHT).status_code == 403
    assert bare(none, "GET", "/v1/models", headers={"Origin": PAGE}).status_code == 403
    assert bare(everybody, "OPTIONS", "/v1/models", headers=PREFLIGHT).status_code == 204
    read = bare(everybody, "GET", "/v1/models", headers={"Origin": PAGE})
    assert (read.status_code, read.headers["access-control-allow-origin"]) == (200, "*")


@pytest.mark.parametrize("origins", ["chat.example.com", "https://a/b", "ftp://a", "https://"])
def test_origins_are_checked_when_they_are_set(start: Start, origins: str) -> None:
    with pytest.raises(ValueError, match=r"expected origins such as https://chat\.example\.com"):
        start(cors_origins=origins)


def test_options_without_an_origin_are_no_preflight(keyed: Installation) -> None:
    answer = bare(keyed, "OPTIONS", "/v1/models")
    assert (answer.status_code, "GET" in answer.headers["allow"]) == (204, True)


# --- probes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/health", "/ping", "/healthz", "/readyz", "/docs"])
def test_probes_need_no_key(keyed: Installation, path: str) -> None:
    whole, head = bare(keyed, "GET", path), bare(keyed, "HEAD", path)
    assert (whole.status_code, head.status_code) == (200, 200)
    assert (head.content, head.headers["content-length"]) == (b"", str(len(whole.content)))


def test_head_is_get_without_a_body(keyed: Installation) -> None:
    for path in ("/v1/models", "/version", "/status", "/openapi.json"):
        assert bare(keyed, "HEAD", path).status_code == 401
        answer = keyed.http.head(path)
        assert (answer.status_code, answer.content) == (200, b"")
    assert keyed.http.head("/nowhere").status_code == 404
    assert keyed.http.head("/v1/chat/completions").status_code == 405


def test_the_version_is_answered(keyed: Installation) -> None:
    from controlplane import __version__

    assert keyed.http.get("/version").json() == {"version": __version__}


# --- keys, paths, bodies ---------------------------------------------------------------------------


@pytest.mark.parametrize("given", [f"bearer {KEY}", f"BEARER {KEY}", f"Bearer  {KEY}"])
def test_a_key_s_scheme_is_written_in_any_case(keyed: Installation, given: str) -> None:
    assert bare(keyed, "GET", "/v1/models", headers={"Authorization": given}).status_code == 200


@pytest.mark.parametrize("given", [KEY, f"Basic {KEY}", f"Bearer{KEY}", f"Bearer {KEY}x", "Bearer", ""])
def test_other_keys_are_wrong(keyed: Installation, given: str) -> None:
    assert bare(keyed, "GET", "/v1/models", headers={"Authorization": given}).status_code == 401


@pytest.mark.parametrize("path", ["/v1/completions/", "//v1/completions", "/v1//completions//"])
def test_slashes_too_many_mean_nothing(keyed: Installation, path: str) -> None:
    answer = keyed.http.post(keyed.url + path, json=BODY)
    assert answer.status_code == 200, answer.text
    assert keyed.http.get("/v1/models/").json() == keyed.http.get("/v1/models").json()
    assert keyed.http.get("/health/").status_code == 200


def test_a_name_with_a_slash_is_no_model(keyed: Installation) -> None:
    answer = keyed.http.get("/v1/models/org/name")
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")


def packed(body: Any, encoding: str) -> dict[str, Any]:
    text = json.dumps(body).encode()
    content = gzip.compress(text, mtime=0) if encoding == "gzip" else zlib.compress(text)
    return {"content": content, "headers": {"Content-Encoding": encoding, "Content-Type": "application/json"}}


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
def test_packed_bodies_are_read(keyed: Installation, encoding: str) -> None:
    assert keyed.http.post("/v1/completions", **packed(BODY, encoding)).status_code == 200
    managed = keyed.http.post("/deploy_model", **packed({"model": "nobody"}, encoding))
    assert managed.json()["error"]["code"] == "model_not_found"


def test_a_packed_change_is_in_the_audit_log_as_it_was_meant(keyed: Installation) -> None:
    keyed.http.post("/deploy_model", **packed({"model": "packed-name"}, "gzip"))
    assert "packed-name" in (keyed.settings.home / "audit.jsonl").read_text()


def test_a_body_that_grows_beyond_the_bound_is_refused(keyed: Installation) -> None:
    """It is 20,000 bytes; this one has 20 MB, in 20 KB."""
    sent = packed({**BODY, "prompt": "x" * 20_000_000}, "gzip")
    assert len(sent["content"]) < 20_000
    answer = keyed.http.post("/v1/completions", **sent)
    assert (answer.status_code, answer.json()["error"]["code"]) == (413, "body_too_large")
    assert "OSTINATO_MAX_BODY_BYTES" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("content", "encoding", "told"),
    [
        (b"{}", "br", "expected gzip, deflate or identity; got 'br'"),
        (b"{}", "zstd", "expected gzip, deflate or identity; got 'zstd'"),
        (b"{}", "gzip", "cannot be unpacked as gzip"),
        (gzip.compress(b"{}", mtime=0)[:-4], "gzip", "exactly one complete gzip"),
        (gzip.compress(b"{}", mtime=0) + b"more", "gzip", "exactly one complete gzip"),
    ],
)
def test_an_unknown_packing_is_named(keyed: Installation, content: bytes, encoding: str, told: str) -> None:
    answer = keyed.http.post("/v1/completions", content=content, headers={"Content-Encoding": encoding})
    assert answer.status_code == 400
    assert told in answer.json()["error"]["message"]


def test_a_packed_body_without_a_key_is_not_unpacked(keyed: Installation) -> None:
    sent = packed(BODY, "gzip")
    assert bare(keyed, "POST", "/v1/completions", **sent).status_code == 401


# --- models, documents -----------------------------------------------------------------------------


def test_bases_come_first_with_their_context(keyed: Installation) -> None:
    """A client that asks the first model asks a base."""
    assert keyed.register("a-variant", "base", "v2")["phase"] == "Ready"
    assert keyed.deploy("a-variant")["phase"] == "Deployed"
    cards = keyed.http.get("/v1/models").json()["data"]
    assert [(card["id"], card["parent"]) for card in cards] == [
        ("base", None),
        ("a-variant", "base"),
        ("v1", "base"),
    ]
    assert {(card["max_model_len"], card["owned_by"]) for card in cards} == {(64, "ostinato")}


def test_the_documents_page_needs_nothing_from_elsewhere(keyed: Installation) -> None:
    page = bare(keyed, "GET", "/docs").text
    assert not [word for word in ("http://", "https://", "<script", "<link", "src=") if word in page]
    for route in keyed.http.get("/openapi.json").json()["paths"]:
        assert route in page
    assert "toolCallParser" in page
    assert KEY not in page
