"""The state store on Redis: for a control plane whose processes are on several hosts.

Redis runs a script as one step, so a commit is one script and a snapshot another. Keys:
`{prefix}:revision`, and per kind the hash `{prefix}:entries:KIND` of key -> "VERSION:VALUE".
"{prefix}" is literal: the braces make it the hash tag that keeps all keys in one slot of a cluster.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import redis
from redis.backoff import NoBackoff
from redis.exceptions import (
    AuthenticationError,
    RedisClusterException,
    RedisError,
    ResponseError,
)
from redis.retry import Retry

from controlplane.errors import InvalidRequest, StaleWrite, Unavailable
from controlplane.state.base import Entry, Snapshot, Write

DEFAULT_PREFIX = "ostinato"

log = logging.getLogger(__name__)

# KEYS: the revision, then one hash per kind. ARGV, five per write: the hash's place in KEYS, the
# key, the expected version ("" for any), "1" to set or "0" to delete, the value.
# Scripts are not rolled back, so everything that can fail (a stale or mistyped key, a revision
# that is no number) comes before the first write.
_COMMIT = """
for i = 1, #ARGV, 5 do
  local stored = redis.call('HGET', KEYS[tonumber(ARGV[i])], ARGV[i + 1])
  local version = stored and string.match(stored, '^(%d+):') or '0'
  if ARGV[i + 2] ~= '' and ARGV[i + 2] ~= version then
    return {0, (i - 1) / 5, version}
  end
end
local revision = string.format('%.0f', redis.call('INCR', KEYS[1]))
for i = 1, #ARGV, 5 do
  local hash = KEYS[tonumber(ARGV[i])]
  if ARGV[i + 3] == '1' then
    redis.call('HSET', hash, ARGV[i + 1], revision .. ':' .. ARGV[i + 4])
  else
    redis.call('HDEL', hash, ARGV[i + 1])
  end
end
return {1, 0, revision}
"""

_SNAPSHOT = """
local found = {redis.call('GET', KEYS[1]) or '0'}
for i = 2, #KEYS do
  found[i] = redis.call('HGETALL', KEYS[i])
end
return found
"""


class RedisStore:
    """A `StateStore` under `{prefix}` on the Redis server or cluster at `url`.

    Safe to share between threads. A command is never sent twice: a commit whose answer was lost may
    have been applied, and only its caller can tell, by reading again.

    Errors: `InvalidRequest` for a malformed url or prefix; `Unavailable` when Redis does not answer
    within `timeout_s`, refuses the login, or cannot write.
    """

    def __init__(self, url: str, *, prefix: str = DEFAULT_PREFIX, timeout_s: float = 3.0) -> None:
        # A brace in the prefix would end the hash tag early.
        if not re.fullmatch(r"[\w.:-]+", prefix):
            raise InvalidRequest(
                f"{prefix!r} is no prefix for Redis keys: expected letters, digits and _ . : -",
                param="state",
            )
        self._prefix = f"{{{prefix}}}"
        self._client = self._connect(url, timeout_s)
        self._commit = self._client.register_script(_COMMIT)
        self._snapshot = self._client.register_script(_SNAPSHOT)

    def revision(self) -> int:
        with _answering():
            return int(cast("str | None", self._client.get(self._revision_key)) or 0)

    def snapshot(self, kinds: Sequence[str]) -> Snapshot:
        """All entries of `kinds`, read by one script."""
        keys = [self._revision_key, *map(self._hash_key, kinds)]
        with _answering():
            revision, *hashes = cast(list[Any], self._snapshot(keys=keys))
        # A script answers with a hash as a flat list: key, value, key, value ...
        entries = {
            kind: {key: _entry(stored) for key, stored in zip(flat[::2], flat[1::2], strict=True)}
            for kind, flat in zip(kinds, hashes, strict=True)
        }
        return Snapshot(int(revision), entries)

    def get(self, kind: str, key: str) -> Entry | None:
        with _answering():
            stored = cast("str | None", self._client.hget(self._hash_key(kind), key))
        return None if stored is None else _entry(stored)

    def commit(self, writes: Sequence[Write]) -> int:
        """Apply all writes or none; returns the new revision.

        Expectations are about the state before the commit, also where two writes name one entry.

        Errors: `StaleWrite` when one does not hold; `Unavailable` when there was no answer, and then
        the commit may or may not have been applied.
        """
        if not writes:
            return self.revision()
        kinds = sorted({write.kind for write in writes})
        places = {kind: place for place, kind in enumerate(kinds, start=2)}
        keys = [self._revision_key, *map(self._hash_key, kinds)]
        arguments = [argument for write in writes for argument in _arguments(write, places[write.kind])]
        with _answering(" (a commit without an answer may have been applied: read again first)"):
            done, index, version = cast(list[Any], self._commit(keys=keys, args=arguments))
        if not done:
            raise _stale(writes[int(index)], int(version))
        return int(version)

    def close(self) -> None:
        self._client.close()

    @property
    def _revision_key(self) -> str:
        return f"{self._prefix}:revision"

    def _hash_key(self, kind: str) -> str:
        return f"{self._prefix}:entries:{kind}"

    def _connect(self, url: str, timeout_s: float) -> redis.Redis | redis.RedisCluster:
        options: dict[str, Any] = {
            "decode_responses": True,
            "socket_timeout": timeout_s,
            "socket_connect_timeout": min(timeout_s, 2.0),
            # redis-py's default would send a commit again after a lost answer.
            "retry": Retry(NoBackoff(), 0),
        }
        client: redis.Redis | None = None
        try:
            with _answering():
                client = redis.Redis.from_url(url, health_check_interval=30, **options)
                client.ping()
                _warn_if_not_durable(client)
                if not _is_cluster(client):
                    return client
                client.close()
                return redis.RedisCluster.from_url(url, **options)
        except (TypeError, ValueError) as error:
            # redis-py's words for an option it does not know or cannot read; they hold no password.
            raise InvalidRequest(f"the URL of the state store is wrong: {error}", param="state") from error


@contextmanager
def _answering(note: str = "") -> Iterator[None]:
    try:
        yield
    except AuthenticationError as error:
        raise Unavailable(
            f"Redis refused the state store's login: {error}; correct the user or password in the URL"
        ) from error
    except (RedisError, RedisClusterException) as error:
        raise Unavailable(
            f"the state store on Redis cannot be used: {error}{note}; try again, and check the server, its "
            "memory and disk, and the network to it",
            retry_after_s=1.0,
        ) from error


def _warn_if_not_durable(client: redis.Redis) -> None:
    """Say what an acknowledged commit would not survive. Managed servers often forbid CONFIG."""
    try:
        # One by one: Redis 6 takes one name only, and "*" would fetch passwords too.
        settings: dict[str, str] = {}
        for name in ("appendonly", "appendfsync", "save", "maxmemory-policy"):
            settings.update(cast(dict[str, str], client.config_get(name)))
    except ResponseError as error:
        log.info("Redis' persistence settings cannot be read: %s", error)
        return
    if settings.get("appendonly") != "yes":
        log.warning(
            "Redis keeps the state without appendonly: %s; set `appendonly yes`",
            "commits after the last snapshot (`save`) are lost when it restarts"
            if settings.get("save")
            else "all of it is lost when it restarts",
        )
    elif settings.get("appendfsync") != "always":
        log.warning("Redis' appendfsync is not `always`: a power cut loses its last acknowledged commits")
    if settings.get("maxmemory-policy", "").startswith("allkeys-"):
        log.warning("Redis may evict the state when memory is short; set `maxmemory-policy noeviction`")


def _is_cluster(client: redis.Redis) -> bool:
    try:
        return bool(client.info("cluster").get("cluster_enabled"))
    except ResponseError:  # INFO is not allowed
        return False


def _entry(stored: str) -> Entry:
    version, _, value = stored.partition(":")
    return Entry(value, int(version))


def _arguments(write: Write, place: int) -> tuple[int | str, ...]:
    expected = "" if write.expected_version is None else str(write.expected_version)
    return (place, write.key, expected, "0" if write.value is None else "1", write.value or "")


def _stale(write: Write, version: int) -> StaleWrite:
    return StaleWrite(
        f"{write.kind} {write.key!r} is at version {version}, expected {write.expected_version} "
        "(0: absent): somebody else changed it, read it again",
        details={"kind": write.kind, "key": write.key, "version": version},
    )
