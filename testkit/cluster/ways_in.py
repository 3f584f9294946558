"""Requests as clients in other languages than Python send them."""

from __future__ import annotations

import gzip
import json
import socket
from typing import Any
from urllib.parse import urlsplit

import httpx

from testkit.cluster.clusters import Cluster

PAGE = "https://chat.example.com"
BODY = {"model": "smol", "prompt": "one two three", "max_tokens": 3}
# The JDK's client offers HTTP/2 in this way.
OFFER = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAEAAEAAAAIAAAABAAMAAABk\r\n"


def answer_every_client(cluster: Cluster) -> None:
    """Send requests as other clients do. Fails at the first unexpected answer."""
    _pages(cluster.http)
    _probes(cluster.http)
    _spellings(cluster.http)
    assert [_text(body) for body in _offering(cluster.url, 3)] == ["one two three"] * 3


def _pages(http: httpx.Client) -> None:
    asking = {"Origin": PAGE, "Access-Control-Request-Method": "POST"}
    told = http.request("OPTIONS", "/v1/chat/completions", headers=asking)
    assert (told.status_code, told.headers["access-control-allow-origin"]) == (204, PAGE)
    other = http.request("OPTIONS", "/v1/models", headers={**asking, "Origin": "https://evil.example.com"})
    assert (other.status_code, "access-control-allow-origin" in other.headers) == (403, False)
    for more in ({}, {"stream": True}, {"model": "nobody"}):
        read = http.post("/v1/completions", json={**BODY, **more}, headers={"Origin": PAGE})
        assert read.headers["access-control-allow-origin"] == PAGE
        assert read.status_code == (404 if "model" in more else 200)


def _probes(http: httpx.Client) -> None:
    for path in ("/health", "/ping", "/version", "/v1/models", "/readyz", "/docs"):
        whole, head = http.get(path), http.head(path)
        assert (whole.status_code, head.status_code, head.content) == (200, 200, b""), path
        assert whole.content


def _spellings(http: httpx.Client) -> None:
    for path in ("/v1/completions/", "/v1//completions"):
        assert _text(http.post(path, json=BODY).content) == "one two three"
    packed = gzip.compress(json.dumps(BODY).encode())
    headers = {"Content-Encoding": "gzip", "Content-Type": "application/json"}
    assert _text(http.post("/v1/completions", content=packed, headers=headers).content) == "one two three"


def _offering(url: str, count: int) -> list[bytes]:
    """The answers to this number of requests, each with that offer, on one connection."""
    parts, body = urlsplit(url), json.dumps(BODY).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n" + OFFER
    sent = b"%bContent-Length: %d\r\n\r\n%b" % (head, len(body), body)
    found = []
    with socket.create_connection((str(parts.hostname), int(parts.port or 80)), timeout=60) as connection:
        stream = connection.makefile("rb")
        for _ in range(count):
            connection.sendall(sent)
            assert stream.readline() == b"HTTP/1.1 200 OK\r\n"
            length = 0
            while (line := stream.readline()) != b"\r\n":
                if line.lower().startswith(b"content-length:"):
                    length = int(line.partition(b":")[2])
            found.append(stream.read(length))
    return found


def _text(body: bytes) -> Any:
    return json.loads(body)["choices"][0]["text"]
