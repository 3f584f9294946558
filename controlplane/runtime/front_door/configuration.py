"""Our changes to the configuration that Ray Serve writes for HAProxy. Pure.

Ray 2.60 has no setting for these lines: limits on clients, errors in our words, ports that only Ray's own
tests read, an admin socket that every user of the machine may write to. Each edit names the text that it
expects. If Ray's template changed, HAProxy does not start; otherwise it would serve without limits.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from controlplane.runtime.front_door.sign_of_life import OFFSET
from controlplane.traffic.endpoints import ENDPOINTS

# Time from the first byte of a request's head to its last.
HEAD_S = 8
KERNEL_BYTES = 64 << 10
# How Ray calls our gateways' servers.
GATEWAY = "SERVE_REPLICA_ostinato-Gateway-"
# Time between two checks of a gateway.
CHECK_MS = 500


class UnknownTemplate(Exception):
    """Ray's template lacks the text that an edit expects."""


@dataclass(frozen=True)
class Limits:
    """`client_s`: how long a client may neither send nor read. `request_s`: the longest time of a whole
    request. `silent_s`: how long a gateway may leave a health check unanswered. `connections`: most client
    connections at once."""

    client_s: int
    request_s: int
    silent_s: float
    connections: int


@dataclass(frozen=True)
class Edit:
    """Replace every match of `pattern`; at least `least` matches must exist."""

    what: str
    pattern: str
    replacement: str | Callable[[re.Match[str]], str]
    least: int = 1


def edited(text: str, limits: Limits, folder: str, listens_on_all: bool = False) -> str:
    """Ray's configuration with our edits. `folder` holds the files of `answers`. `listens_on_all`: listen
    on IPv6, too, where Ray binds IPv4 only. Raises UnknownTemplate."""
    backends, gateways = text.count("\n    option httpchk "), text.count(f"\n    server {GATEWAY}")
    for edit in _edits(limits, folder, listens_on_all, backends, gateways):
        text, found = re.subn(edit.pattern, edit.replacement, text, flags=re.MULTILINE)
        if found < edit.least:
            raise UnknownTemplate(
                f"expected {edit.what} in HAProxy's configuration, as Ray 2.60 writes it, found none; this"
                " version of Ray is not supported: install the version that pyproject.toml names"
            )
    return text


def _edits(limits: Limits, folder: str, listens_on_all: bool, backends: int, gateways: int) -> list[Edit]:
    edits = [
        Edit("a log of each request, by UDP to any listener", r"^    log \S+ local0 info\n", ""),
        Edit(
            "an admin socket of mode 666",
            r"^(    stats socket \S+) mode 666 ",
            r"\1 mode 600 ",
        ),
        Edit("a limit of connections", r"^    maxconn \d+$", f"    maxconn {limits.connections}"),
        # The kernel would keep megabytes of an answer that a client does not read, on both sides of HAProxy.
        Edit(
            "a size of buffers",
            r"^(    tune.bufsize \d+)$",
            rf"\1\n    tune.sndbuf.client {KERNEL_BYTES}\n    tune.rcvbuf.server {KERNEL_BYTES}",
        ),
        # After a reload, the old process ends its remaining requests after this time.
        Edit(
            "the end of HAProxy's predecessor",
            r"^    hard-stop-after \d+s$",
            f"    hard-stop-after {limits.request_s}s",
        ),
        Edit("a timeout of clients", r"^    timeout client \d+s ?$", _timeouts(limits)),
        Edit("answers in place of 502, 503 and 504", r"(^    errorfile \d+ \S+\n)+", _errorfiles(folder)),
        Edit("a port for Prometheus", r"^frontend prometheus\n(?:    .*\n)+", ""),
        Edit("a port for statistics", r"^listen stats\n(?:  .*\n)+", ""),
        Edit(
            "the list of applications",
            r"^    http-request return .* if routes$",
            f"    http-request return status 403 content-type application/json file {folder}/routes.json"
            " if routes",
        ),
        Edit(
            "an answer for paths that no application has",
            r"^    http-request return status 404 .*$",
            "    http-request return status 503 content-type application/json"
            f" file {folder}/absent.json hdr Retry-After 1",
        ),
        # A gateway that does not answer a check gets no further requests, and its running requests are ended.
        Edit(
            "how gateways are checked",
            r"^    default-server .* check$",
            f"    default-server inter {CHECK_MS}ms fastinter {CHECK_MS}ms downinter {CHECK_MS}ms"
            " fall 1 rise 1 check on-marked-down shutdown-sessions",
            backends,
        ),
        Edit(
            "the gateways",  # not other applications' replicas
            rf"^(    server {GATEWAY}\S+ \S+:(\d+)) check\b",
            lambda found: f"{found[1]} check port {int(found[2]) + OFFSET}",
            gateways,
        ),
        # The kernel ends a connection on which a client reads nothing, even after HAProxy has finished with
        # it.
        Edit(
            "the port of the API",
            r"^(frontend http_frontend\n    bind \S+)$",
            rf"\1 tcp-ut {limits.client_s}s",
        ),
        Edit("which failures are retried", r"^    retry-on conn-failure$", _RETRIES),
        Edit("which requests are logged for Serve's metrics", r"^    log-format-sd .*$", _repeatable),
        # Serve's Python proxy on the head, which closes every connection (`fallback`).
        Edit(
            "Serve's own proxy", r"^(    server \S*fallback\S* \S+) check backup$", r"\1 disabled backup", 0
        ),
    ]
    if listens_on_all:
        edits.append(Edit("the port of the API", r"^    bind \*:(\d+)", r"    bind :::\1 v4v6"))
    return edits


# HAProxy sends a request to another gateway in two cases. The request reached no gateway; or its gateway
# ended before it answered, and the request may safely run twice.
_RETRIES = "    retry-on conn-failure empty-response\n    retries 2"
_REPEATABLE = (
    "acl repeatable method GET HEAD OPTIONS",
    f"acl repeatable path {' '.join(ENDPOINTS)}",
    "acl repeatable req.hdr(idempotency-key) -m found",
    "http-request disable-l7-retry if !repeatable",
)


def _repeatable(line: re.Match[str]) -> str:
    return "\n".join([line[0], *(f"    {rule}" for rule in _REPEATABLE)])


def _timeouts(limits: Limits) -> str:
    lines = (
        # A connection without a request is closed without an answer, and is not counted as a request.
        "option http-ignore-probes",
        "option dontlognull",
        "option forwardfor",  # the audit log records this client address
        f"timeout client {limits.client_s}s",
        f"timeout client-fin {limits.client_s}s",
        f"timeout http-request {HEAD_S}s",
        f"timeout check {round(1000 * limits.silent_s)}ms",
    )
    return "\n".join(f"    {line}" for line in lines)


def _errorfiles(folder: str) -> str:
    return "".join(f"    errorfile {status} {folder}/{status}.http\n" for status in ERROR_STATUSES)


# The statuses of HAProxy's own answers.
ERROR_STATUSES = (500, 502, 503, 504)
