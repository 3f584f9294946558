"""Hostile requests that try to break a gateway, drawn from a seed and from the gateway's own description."""

from __future__ import annotations

import json
import re
import socket
from dataclasses import dataclass
from random import Random
from typing import Any
from urllib.parse import quote, urlsplit

from testkit.fuzz import hostile_json

METHODS = ("GET", "POST", "PUT", "DELETE", "PATCH", "HEAD", "OPTIONS", "TRACE", "get", "X", "CONNECT")
NAMES = (
    "base",
    "v1",
    "base:v1",
    "other",
    "none",
    "x",
    "",
    ".",
    "..",
    "%00",
    "%2e%2e",
    "a" * 192,
    "a" * 5_000,
    "é",
)
SEGMENTS = (*NAMES, "%ff", "%", "base%20", "base/..", "a/b", "base;x=1", "%F0%9F%98%80", "-1", "*", "op-1")
QUERIES = (
    *(
        "limit=-1",
        "limit=99999999999999999999",
        "limit=x",
        "lines=-1",
        "lines=1e9",
        "wait=inf",
        "watch=maybe",
    ),
    *(
        "timeout=NaN",
        "a=1&a=2",
        "%ff=%00",
        "=",
        "&&&",
        "q=" + "z" * 3_000,
        "again=%20",
        "target=",
        "rate=1e999",
    ),
)
HEADERS = (
    *("Idempotency-Key: k", "Idempotency-Key: " + "k" * 3_000, "Idempotency-Key: \xff", "Idempotency-Key:"),
    *("Content-Type: text/plain", "Content-Type: application/x-www-form-urlencoded", "Content-Type: \x80"),
    *("Content-Type: multipart/form-data; boundary=x", "Content-Type: application/json; charset=utf-16"),
    *("Accept: text/event-stream", "Accept: */*;q=nan", "Content-Encoding: gzip", "Expect: 100-continue"),
    *(
        "Authorization: Bearer x",
        "Authorization: Basic \xe9",
        "Authorization:",
        "Host: evil.example",
        "Host:",
    ),
    *("Origin: http://evil.example", "Connection: close", "Connection: Upgrade", "Upgrade: websocket"),
    *(
        "X-Request-Id: " + "r" * 200,
        "Cookie: " + "c" * 2_000,
        "Range: bytes=0-1",
        "Forwarded: for=x",
        "TE: x",
    ),
    *("x-ostinato-priority: high", "x-ostinato-priority: \xff", "x-ostinato-ttft-ms: -1", "Last-Event-ID: x"),
    *(
        "x-ostinato-deadline-ms: nan",
        "x-ostinato-ttft-ms: 1e999",
        "x-ostinato-late: drop",
        "x-slo-ttft-ms: 1",
        "x-ostinato-session: \x80",
        "traceparent: 00-x",
    ),
)
CODES_WITH_REASON = {503: {"unavailable"}, 504: {"late", "timed_out"}}
WAIT_S = 60.0


@dataclass(frozen=True)
class Request:
    """`whole`: an HTTP request that is to be answered; else it may be cut off as well."""

    raw: bytes
    whole: bool
    what: str
    has_body: bool = True


class Drawer:
    """Draws requests by an OpenAPI description, about these files."""

    def __init__(self, description: dict[str, Any], files: str, headers: tuple[str, ...] = ()) -> None:
        self._headers = (*HEADERS, *headers)
        self._schemas = description.get("components", {}).get("schemas", {})
        self._files = files
        self._more = 0.0  # how likely a body has a field that it need not have
        self._routes = [
            (method.upper(), path, operation)
            for path, operations in sorted(description["paths"].items())
            for method, operation in operations.items()
        ]

    def draw(self, seed: int) -> Request:
        random = Random(seed)
        if random.random() < 0.03:
            return self._garbage(random)
        method, path, operation = random.choice(self._routes)
        body = self._body(operation, random)
        what = f"{method} {path}"
        if random.random() < 0.06:
            method = random.choice(METHODS)
        target = self._target(path, operation, random, removing=method == "DELETE" and random.random() < 0.9)
        lines = [f"{method} {target} HTTP/1.1", "Host: localhost"]
        if body is not None and random.random() < 0.9:
            lines.append("Content-Type: application/json")
        if random.random() < 0.25:
            lines += random.sample(self._headers, random.choice((1, 1, 2, 4)))
        framed, whole = _framed(body, random)
        head = "\r\n".join([*lines, *framed[0]]).encode("latin-1", "replace") + b"\r\n\r\n"
        closes = any(
            line.lower().startswith(("upgrade", "connection", "expect", "host:")) for line in lines[2:]
        )
        proper = whole and method in METHODS[:8] and not closes
        return Request(head + framed[1], proper, what, method != "HEAD")

    def example(self, schema: Any, random: Random, more: float) -> Any:
        """A value of a schema, with each field that it need not have `more` likely."""
        self._more = more
        return self._example(schema, random)

    def _target(self, path: str, operation: dict[str, Any], random: Random, removing: bool) -> str:
        known = ("other", "x", "v1") if removing else ("base", "base", "v1", "other", "base:v1")

        def segment(match: re.Match[str]) -> str:
            return random.choice(known) if random.random() < 0.7 else _escaped(random.choice(SEGMENTS))

        target = re.sub(r"\{[^}]*\}", segment, path)
        if random.random() < 0.05:
            at = random.randrange(len(target) + 1)
            target = (
                target[:at] + random.choice(("/", "//", "%2f", "?", "#", "..", "/./", "%", ";")) + target[at:]
            )
        query = []
        for parameter in operation.get("parameters", ()):
            if parameter["in"] == "query" and random.random() < 0.5:
                value = self._example(parameter.get("schema", {}), random)
                value = value if random.random() < 0.6 else hostile_json.mutated(value, random)
                query.append(f"{parameter['name']}={quote(str(value)[:2_000], errors='replace')}")
        if random.random() < 0.05:
            query.append(random.choice(QUERIES))
        return target + ("?" + "&".join(query) if query else "")

    def _body(self, operation: dict[str, Any], random: Random) -> bytes | None:
        content = operation.get("requestBody", {}).get("content", {})
        if not content:
            return random.choice((None, None, None, b"{}", b"[" * 3_000))
        schema = content.get("application/json", {}).get("schema", {})
        self._more = random.choice((0.0, 0.05, 0.3))
        value = self._example(schema, random)
        if random.random() < 0.4:
            return json.dumps(value).encode()
        made = hostile_json.written(hostile_json.mutated(value, random, random.choice((1, 1, 1, 2, 4))))
        return hostile_json.scratched(made, random) if random.random() < 0.1 else made

    def _example(self, schema: Any, random: Random, depth: int = 0) -> Any:
        """A value that the schema takes, as far as that is easily told."""
        schema = schema if isinstance(schema, dict) and depth <= 6 else {}
        if "$ref" in schema:
            return self._example(self._schemas.get(schema["$ref"].rpartition("/")[2]), random, depth + 1)
        for key in ("anyOf", "oneOf", "allOf"):
            if schema.get(key):
                return self._example(random.choice(schema[key]), random, depth + 1)
        if fixed := schema.get("enum") or ([schema["const"]] if "const" in schema else []):
            return random.choice(fixed)
        if schema.get("type") == "object":
            return self._object(schema, random, depth)
        if schema.get("type") == "array":
            return [self._example(schema.get("items"), random, depth + 1) for _ in range(random.randrange(3))]
        least, most = schema.get("minimum", 1), schema.get("maximum", 64)
        simple: dict[str, tuple[Any, ...]] = {
            "integer": (0, 1, 2, 16, least, most),
            "number": (0.0, 0.5, 1.0, least, most),
            "boolean": (True, False),
            "string": ("a", "base", "hello there", "", schema.get("default", "x")),
        }
        return random.choice(simple.get(str(schema.get("type")), (None,)))

    def _object(self, schema: dict[str, Any], random: Random, depth: int) -> dict[str, Any]:
        required = list(schema.get("required", ()))
        if {"source", "adapter"} <= schema.get("properties", {}).keys():  # a registration names either
            required += random.choice((["source"], ["base", "adapter"]))
        return {
            name: self._named(name, each, random, depth)
            for name, each in schema.get("properties", {}).items()
            if name in required or random.random() < self._more
        }

    def _named(self, name: str, schema: Any, random: Random, depth: int) -> Any:
        """What makes sense there, most often: else nothing behind a name is reached."""
        folder = f"{self._files}/{random.choice(('base', 'v1', 'other', 'torn', 'shape', 'nothing', ''))}"
        source, base = (folder, f"file://{folder}", "/etc"), ("base", "v1", "none")
        known: dict[str, tuple[Any, ...]] = {
            "model": ("base", "base", "v1", *NAMES[:6]),
            "lora_name": ("x", "other", "v1"),
            **{
                "base": base,
                "base_model_name": base,
                "source": source,
                "adapter": source,
                "lora_path": source,
            },
            "messages": ([{"role": "user", "content": "hello there"}],),
            **{"prompt": ("hello there",), "inputText": ("hello there",)},
        }
        if name in known and random.random() < 0.8:
            return random.choice(known[name])
        return self._example(schema, random, depth + 1)

    def _garbage(self, random: Random) -> Request:
        raw = random.choice(
            (
                random.randbytes(random.choice((1, 20, 500))) + b"\r\n\r\n",
                b"GET / HTTP/9.9\r\n\r\n",
                b"GET /healthz HTTP/1.1\r\nHost: x\r\nContent-Length: 1, 2\r\n\r\n",
                b"POST /plan HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nabcdef",
                b"POST /register_model HTTP/1.1\r\nHost: x\r\nContent-Length: " + b"9" * 5_000 + b"\r\n\r\n",
                b"POST /register_model HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n",
                b"POST /plan HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nffffffffffffffffff\r\n",
                b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n-1\r\n\r\n",
                b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: gzip\r\n\r\nabc",
                b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + random.randbytes(60),
                b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
                b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
                b"GET http://evil.example/healthz HTTP/1.1\r\nHost: x\r\n\r\n",
                b"GET /healthz\r\n\r\n",
                b"\r\n" * 50 + b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n",
                b"GET /healthz HTTP/1.1\r\nHost: x\r\n folded: y\r\n\r\n",
                b"GET /healthz HTTP/1.1\r\nHo st: x\r\n\r\n",
                b"GET /healthz HTTP/1.1\nHost: x\n\n",
            )
        )
        return Request(raw, False, "garbage")


def _escaped(segment: str) -> str:
    return quote(segment, safe="%/;*")


def _framed(body: bytes | None, random: Random) -> tuple[tuple[list[str], bytes], bool]:
    """Lines of the head and the bytes behind it; whether that is a whole request."""
    if body is None:
        return ([], b""), True
    chance = random.random()
    if chance < 0.85:
        return ([f"Content-Length: {len(body)}"], body), True
    if chance < 0.94:
        return (["Transfer-Encoding: chunked"], _chunked(body, random)), True
    if chance < 0.96:
        return (["Transfer-Encoding: chunked"], _chunked(body, random)[:-5]), False
    if chance < 0.98:
        return ([f"Content-Length: {len(body) + random.choice((1, 100, 10**9))}"], body), False
    return ([f"Content-Length: {len(body)}", "Transfer-Encoding: chunked"], _chunked(body, random)), False


def _chunked(body: bytes, random: Random) -> bytes:
    parts, at = [], 0
    while at < len(body):
        size = random.choice((1, 7, 1_000, len(body)))
        part = body[at : at + size]
        parts.append(b"%x\r\n%s\r\n" % (len(part), part))
        at += size
        if len(parts) > 20:
            parts.append(b"%x\r\n%s\r\n" % (len(body) - at, body[at:]) if at < len(body) else b"")
            break
    return b"".join(parts) + b"0\r\n\r\n"


# --- over a socket ----------------------------------------------------------------------------------------


class Broken(AssertionError):
    """What must not happen: the message says what did."""


class Client:
    """Sends raw requests over one connection as long as it lasts."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        assert parts.hostname is not None
        assert parts.port is not None
        self._address = (parts.hostname, parts.port)
        self._socket: socket.socket | None = None
        self._kept = b""

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
        self._socket, self._kept = None, b""

    def send(self, request: Request) -> int:
        """The status of the answer; 0 where the connection was closed without one. Raises Broken."""
        for attempt in (1, 2):
            fresh = self._socket is None
            if self._socket is None:
                self._socket = socket.create_connection(self._address, WAIT_S)
                self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            try:
                status = self._exchange(self._socket, request)
            except TimeoutError as e:
                raise Broken(f"no answer within {WAIT_S:g} s") from e
            except OSError:
                status = 0
            if not request.whole or not status:
                self.close()
            if status or fresh or attempt == 2:  # a connection that was kept may have been closed meanwhile
                if request.whole and not status:
                    raise Broken("the connection was closed without an answer")
                return status
        return 0

    def _exchange(self, connection: socket.socket, request: Request) -> int:
        connection.sendall(request.raw)
        if not request.whole:
            connection.shutdown(socket.SHUT_WR)
        while b"\r\n\r\n" not in self._kept:
            if not (piece := connection.recv(65536)):
                return 0
            self._kept += piece
        head, _, self._kept = self._kept.partition(b"\r\n\r\n")
        status = int(head[9:12])
        lowered = head.lower()
        if status < 200 or b"text/event-stream" in lowered or not request.has_body or not request.whole:
            body = b""
            if status >= 500:
                body = self._rest(connection, lowered)
            self.close()
        else:
            body = self._rest(connection, lowered)
            if b"connection: close" in lowered:
                self.close()
        _judge(status, body, request)
        return status

    def _rest(self, connection: socket.socket, head: bytes) -> bytes:
        if (length := re.search(rb"content-length: *(\d+)", head)) is not None:
            return self._read(connection, int(length[1]))
        if b"transfer-encoding: chunked" not in head:
            return b""
        body = b""
        while True:
            while b"\r\n" not in self._kept:
                self._more(connection)
            size, _, self._kept = self._kept.partition(b"\r\n")
            body += self._read(connection, int(size, 16) + 2)[:-2]
            if not int(size, 16):
                return body

    def _read(self, connection: socket.socket, count: int) -> bytes:
        while len(self._kept) < count:
            self._more(connection)
        body, self._kept = self._kept[:count], self._kept[count:]
        return body

    def _more(self, connection: socket.socket) -> None:
        if not (piece := connection.recv(65536)):
            raise ConnectionResetError("closed within an answer")
        self._kept += piece


def _judge(status: int, body: bytes, request: Request) -> None:
    """A 5xx is broken, unless the state is its reason."""
    if status < 500:
        return
    try:
        code = json.loads(body)["error"]["code"]
    except (ValueError, KeyError, TypeError):
        code = "?"
    if code not in CODES_WITH_REASON.get(status, ()):
        raise Broken(f"{status} {code}: {body[:200]!r}")
