"""Open the store that a URL names: a local SQLite file, or Redis."""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Callable, Collection
from functools import partial
from urllib.parse import parse_qsl, unquote, urlencode, urlsplit

from controlplane.errors import InvalidRequest, Unavailable
from controlplane.repeated_lines import REPEATED, Rarely
from controlplane.state.base import StateStore
from controlplane.state.installation import Missing, NotOwn, OwnStore
from controlplane.state.sqlite import SqliteStore

log = logging.getLogger(__name__)
log.addFilter(Rarely())

START_S = 120.0  # how long a starting process waits for a store that does not answer yet

_ACCEPTED = (
    "sqlite:///absolute/path.db, redis://host:port/db[?prefix=name&replicas=n], rediss://host:port/db[?...] "
    "or unix:///path/redis.sock[?db=0&prefix=name]"
)


def open_store(url: str, must_exist: bool = False) -> StateStore:
    """Open the store that `url` names. A SQLite file is created if it is missing, unless it `must_exist`.

    Errors: `InvalidRequest` for a URL that names no store; `Unavailable` when the store exists but cannot be
    used (damaged, from newer software, not answering).
    """
    scheme = url.partition("://")[0]
    if scheme == "sqlite":
        path = _sqlite_path(url)
        if must_exist and not os.path.exists(path):
            raise Missing(path)
        return SqliteStore(path)
    if scheme in {"redis", "rediss", "unix"}:
        return _open_redis(url)
    # Only the scheme is repeated: the rest of a mistyped URL may hold a password.
    raise InvalidRequest(
        f"expected OSTINATO_STORE_URL to be {_ACCEPTED}, got {scheme.split(':')[0]!r}", param="state"
    )


def own_store(url: str, running: Callable[[], Collection[str]]) -> OwnStore:
    """The store that `url` names, as a process of its installation uses it, opened at its first use.
    `running` gives the identities that the running engines have."""
    return OwnStore(partial(open_store, url), running)


def open_store_at_start(
    url: str, running: Callable[[], Collection[str]], wait_s: float = START_S
) -> StateStore:
    """As `own_store`, for a store that may still be starting: Serve gives up a replica that fails three
    times. A store that does not belong to the running engines is checked again at each use.

    A problem that waiting does not change (a damaged file, a wrong password) is an error at once.
    """
    until_s, store = time.monotonic() + wait_s, own_store(url, running)
    while True:
        try:
            store.claim()
            return store
        except NotOwn as e:
            log.error("%s", e)
            return store
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
            f"expected OSTINATO_STORE_URL to be sqlite:///absolute/path.db (no options), got {url!r} "
            "(write '?' and '#' in a path as %3F and %23)",
            param="state",
        )
    return path


def _open_redis(url: str) -> StateStore:
    """Open Redis. The query's `prefix` and `replicas` are ours, other options redis-py's, imported only
    here."""
    from controlplane.state.redis import DEFAULT_PREFIX, RedisStore

    parts = urlsplit(url)
    options = dict(parse_qsl(parts.query, keep_blank_values=True))
    prefix, replicas = options.pop("prefix", DEFAULT_PREFIX), options.pop("replicas", "0")
    if not re.fullmatch(r"\d{1,2}", replicas):
        raise InvalidRequest(
            f"expected 0 to 99 for replicas in OSTINATO_STORE_URL, got {replicas!r}", param="state"
        )
    # redis-py would silently use database 0 for a path that is not a number.
    if parts.scheme != "unix" and parts.path.strip("/") and not parts.path.strip("/").isdecimal():
        raise InvalidRequest(f"expected a database number in {_ACCEPTED}, got {parts.path!r}", param="state")
    # Not geturl(): it loses the slashes of unix:///path.
    base = url.partition("?")[0]
    url = f"{base}?{urlencode(options)}" if options else base
    return RedisStore(url, prefix=prefix, replicas=int(replicas))
