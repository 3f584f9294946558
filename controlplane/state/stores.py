"""Opens the store that a URL names: a local SQLite file, or Redis."""

from __future__ import annotations

import logging
import re
import time
from urllib.parse import parse_qsl, unquote, urlencode, urlsplit

from controlplane.errors import InvalidRequest, Unavailable
from controlplane.repeated_lines import REPEATED, Rarely
from controlplane.state.base import StateStore
from controlplane.state.sqlite import SqliteStore

log = logging.getLogger(__name__)
log.addFilter(Rarely())

START_S = 120.0  # so long a process that starts waits for a store that does not answer yet

_ACCEPTED = (
    "sqlite:///absolute/path.db, redis://host:port/db[?prefix=name&replicas=n], rediss://host:port/db[?...] "
    "or unix:///path/redis.sock[?db=0&prefix=name]"
)


def open_store(url: str) -> StateStore:
    """Open the store that `url` names.

    Errors: `InvalidRequest` for a URL that names no store; `Unavailable` when the store is there but
    cannot be used (damaged, from newer software, not answering).
    """
    scheme = url.partition("://")[0]
    if scheme == "sqlite":
        return SqliteStore(_sqlite_path(url))
    if scheme in {"redis", "rediss", "unix"}:
        return _open_redis(url)
    # Only the scheme is repeated: the rest of a mistyped URL may hold a password.
    raise InvalidRequest(f"unknown state store {scheme.split(':')[0]!r}: expected {_ACCEPTED}", param="state")


def open_store_at_start(url: str, wait_s: float = START_S) -> StateStore:
    """As `open_store`, of a store that may still be starting: Serve gives up a replica that fails three
    times.

    What waiting does not change (a damaged file, a wrong password) is an error at once.
    """
    until_s = time.monotonic() + wait_s
    while True:
        try:
            return open_store(url)
        except Unavailable as e:
            if e.retry_after_s is None or time.monotonic() > until_s:
                raise
            log.warning("waiting for the state store: %s", e, extra=REPEATED)
            time.sleep(e.retry_after_s)


def _sqlite_path(url: str) -> str:
    parts = urlsplit(url)
    path = unquote(parts.path)
    if parts.netloc or parts.query or parts.fragment or not path.startswith("/") or path.endswith("/"):
        raise InvalidRequest(
            f"{url!r} is no absolute path of a file: expected sqlite:///absolute/path.db, three slashes "
            "and no options (write '?' and '#' in a path as %3F and %23)",
            param="state",
        )
    return path


def _open_redis(url: str) -> StateStore:
    """The query's `prefix` and `replicas` are ours, the rest redis-py's, which only its users import."""
    from controlplane.state.redis import DEFAULT_PREFIX, RedisStore

    parts = urlsplit(url)
    options = dict(parse_qsl(parts.query, keep_blank_values=True))
    prefix, replicas = options.pop("prefix", DEFAULT_PREFIX), options.pop("replicas", "0")
    if not re.fullmatch(r"\d{1,2}", replicas):
        raise InvalidRequest(
            f"replicas={replicas!r} is no number of replicas: expected 0 to 99", param="state"
        )
    # redis-py would silently use database 0 for a path that is no number.
    if parts.scheme != "unix" and parts.path.strip("/") and not parts.path.strip("/").isdecimal():
        raise InvalidRequest(f"{parts.path!r} is no database number: expected {_ACCEPTED}", param="state")
    # Not geturl(): it loses the slashes of unix:///path.
    base = url.partition("?")[0]
    url = f"{base}?{urlencode(options)}" if options else base
    return RedisStore(url, prefix=prefix, replicas=int(replicas))
