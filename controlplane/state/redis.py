"""The state store on Redis: for a control plane whose processes are on several hosts.

A commit is one script (redis_scripts.py), and so is a read. Keys:
- `{prefix}:revision`, and per kind the hash `{prefix}:entries:KIND` of key -> "VERSION:VALUE";
- `{prefix}:changes`, a sorted set of "KIND:KEY" by the revision that wrote it last, deletions included, and
  the hash `{prefix}:log`: the revisions that this set covers (from, complete), and the server that wrote it;
- `{prefix}:lease:NAME`, a hash: holder, epoch, until (milliseconds of the server's clock).
"{prefix}" is literal: the braces make it the hash tag that keeps all keys in one slot of a cluster.

A failover. A replica that becomes the primary may lack the last commits. With `?replicas=N` a commit is
acknowledged when N replicas have it (WAIT). Even if commits were lost, no revision is used twice: the first
commit on a server with another history skips to the next multiple of 2^32 (an epoch in the high bits). A
process that sees the revision fall logs an error.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
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
from controlplane.state.base import Changes, Entry, Fenced, Lease, Require, Snapshot, Write, not_as_required
from controlplane.state.redis_scripts import CHANGES, COMMIT, RELEASE_LEASE, SNAPSHOT, TAKE_LEASE

DEFAULT_PREFIX = "ostinato"

log = logging.getLogger(__name__)

EPOCH = 1 << 32  # revisions
PAGE = 500  # entries, approximately
KEPT_CHANGES = 20_000  # readers that are further behind read everything
WAIT_MS = 1_000
_PERHAPS = " (a commit without an answer may have been applied: read the state first)"


class RedisStore:
    """A `StateStore` under `{prefix}` on the Redis server or cluster at `url`.

    Safe to share between threads. A command is never sent twice: a commit whose answer was lost may have been
    applied, and its caller must read again to find out. The same holds for a commit that fewer than
    `replicas` replicas of the server have after WAIT_MS.

    Errors: `InvalidRequest` for a malformed url, prefix or number of replicas; `Unavailable` when Redis does
    not answer within `timeout_s`, refuses the login, or cannot write.
    """

    def __init__(
        self, url: str, *, prefix: str = DEFAULT_PREFIX, replicas: int = 0, timeout_s: float = 3.0
    ) -> None:
        # A brace in the prefix would end the hash tag early.
        if not re.fullmatch(r"[\w.:-]+", prefix):
            raise InvalidRequest(
                f"expected a prefix of Redis keys with letters, digits and _ . : - only, got {prefix!r}",
                param="state",
            )
        self._prefix = f"{{{prefix}}}"
        self._replicas = replicas
        self._seen = 0  # the highest revision so far
        self._client = self._connect(url, timeout_s)
        register = self._client.register_script
        self._commit, self._snapshot = register(COMMIT), register(SNAPSHOT)
        self._changes = register(CHANGES)
        self._take, self._release = register(TAKE_LEASE), register(RELEASE_LEASE)

    def revision(self) -> int:
        with _answering(), self._moving() as moved:
            return moved(int(cast("str | None", self._client.get(self._revision_key)) or 0))

    def snapshot(self, kinds: Sequence[str]) -> Snapshot:
        """All entries of `kinds`, read by one script."""
        keys = [self._revision_key, *map(self._hash_key, kinds)]
        with _answering(), self._moving() as moved:
            revision, *hashes = cast(list[Any], self._snapshot(keys=keys))
            moved(int(revision))
        # A script returns a hash as a flat list: key, value, key, value ...
        entries = {
            kind: {key: _entry(stored) for key, stored in zip(flat[::2], flat[1::2], strict=True)}
            for kind, flat in zip(kinds, hashes, strict=True)
        }
        return Snapshot(int(revision), entries)

    def changes(self, kinds: Sequence[str], since: int) -> Changes | None:
        """Read by one script. None: the revision is too old, or not of this server's history."""
        keys = [self._revision_key, self._log_key, self._changes_key, *map(self._hash_key, kinds)]
        with _answering(), self._moving() as moved:
            found = cast("list[Any] | None", self._changes(keys=keys, args=[since, *kinds]))
            if found is None:
                return None
            revision, *flat = found
            moved(int(revision))
        changed: dict[str, dict[str, Entry | None]] = {}
        for name, stored in zip(flat[::2], flat[1::2], strict=True):
            kind, _, key = name.partition(":")
            changed.setdefault(kind, {})[key] = _entry(stored) if stored else None
        return Changes(int(revision), changed)

    def get(self, kind: str, key: str) -> Entry | None:
        with _answering():
            stored = cast("str | None", self._client.hget(self._hash_key(kind), key))
        return None if stored is None else _entry(stored)

    def pages(self, kind: str) -> Iterator[Mapping[str, Entry]]:
        at, is_first = 0, True
        while at or is_first:
            with _answering():
                found = self._client.hscan(self._hash_key(kind), cursor=at, count=PAGE)
            at, stored = cast("tuple[int, dict[str, str]]", found)
            is_first = False
            yield {key: _entry(value) for key, value in stored.items()}

    def commit(self, writes: Sequence[Write | Require], lease: Lease | None = None) -> int:
        """Apply all writes or none; returns the new revision.

        Expectations are about the state before the commit, even if two writes name one entry.

        Errors: `StaleWrite` when an expectation does not hold; `Fenced`; `Unavailable` when there was no
        answer, or too few replicas have the commit, which then may or may not have been applied.
        """
        if not writes:
            return self.revision()
        kinds = sorted({write.kind for write in writes})
        places = {kind: place for place, kind in enumerate(kinds, start=5)}
        lease_key = self._lease_key(lease.name if lease else "")
        keys = [self._revision_key, self._log_key, self._changes_key, lease_key]
        holder, epoch = (lease.holder, lease.epoch) if lease else ("", 0)
        arguments: list[int | str] = [holder, epoch, EPOCH, KEPT_CHANGES]
        for write in writes:
            arguments.extend(_arguments(write, places[write.kind]))
        with _answering(_PERHAPS), self._moving() as moved:
            (done, index, version), there = self._run([*keys, *map(self._hash_key, kinds)], arguments)
            if done > 0:
                moved(int(version))
        if done < 0 and lease is not None:
            raise Fenced(lease)
        if not done:
            raise _stale(writes[index], int(version))
        if there < self._replicas:
            raise Unavailable(
                f"only {there} of {self._replicas} Redis replicas confirmed this commit within {WAIT_MS} ms: "
                "it was applied, but a failover may lose it; check that the replicas are connected",
                retry_after_s=1.0,
            )
        return int(version)

    def _run(self, keys: list[str], arguments: list[int | str]) -> tuple[tuple[int, int, str], int]:
        """The answer of the commit's script, and the number of replicas that have the commit."""
        if not self._replicas:
            return cast(Any, self._commit(keys=keys, args=arguments)), 0
        client = self._client
        if isinstance(client, redis.RedisCluster):
            node = cast(Any, client).get_node_from_key(keys[0])
            client = client.get_redis_connection(node)
        with client.pipeline(transaction=False) as on_one_connection:
            self._commit(keys=keys, args=arguments, client=on_one_connection)
            on_one_connection.wait(self._replicas, WAIT_MS)
            outcome, there = on_one_connection.execute()
        return outcome, int(there)

    def take_lease(self, name: str, holder: str, seconds: float, gone: str | None = None) -> Lease:
        """Take or prolong a lease by the server's clock."""
        arguments: list[int | str] = [holder, max(1, round(seconds * 1000)), gone or ""]
        with _answering():
            taken, epoch = cast("list[Any]", self._take(keys=[self._lease_key(name)], args=arguments))
        return Lease(name, str(taken), int(epoch))

    def release_lease(self, lease: Lease) -> None:
        with _answering():
            self._release(keys=[self._lease_key(lease.name)], args=[lease.holder, lease.epoch])

    def close(self) -> None:
        self._client.close()

    @property
    def _revision_key(self) -> str:
        return f"{self._prefix}:revision"

    @property
    def _log_key(self) -> str:
        return f"{self._prefix}:log"

    @property
    def _changes_key(self) -> str:
        return f"{self._prefix}:changes"

    def _hash_key(self, kind: str) -> str:
        return f"{self._prefix}:entries:{kind}"

    def _lease_key(self, name: str) -> str:
        return f"{self._prefix}:lease:{name}"

    @contextmanager
    def _moving(self) -> Iterator[Callable[[int], int]]:
        """A context for one command; call the result with the revision in the command's answer. Logs an error
        when history was lost, because later readers must never see an older revision."""
        before = self._seen

        def moved(revision: int) -> int:
            if revision < before:
                log.error(
                    "the state in Redis went back from revision %d to %d (by a failover or an old copy of "
                    "the data): the commits between them are lost; ?replicas=N in the store's URL "
                    "acknowledges a commit only after N replicas have it",
                    before,
                    revision,
                )
            self._seen = revision if revision < before else max(self._seen, revision)
            return revision

        yield moved

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
                _warn_of_failovers(client, self._replicas)
                if not _is_cluster(client):
                    return client
                client.close()
                return redis.RedisCluster.from_url(url, **options)
        except (TypeError, ValueError) as error:
            # redis-py's words for an option it does not know or cannot read; they hold no password.
            raise InvalidRequest(f"the URL of the state store is invalid: {error}", param="state") from error


@contextmanager
def _answering(note: str = "") -> Iterator[None]:
    try:
        yield
    except AuthenticationError as error:
        raise Unavailable(
            f"Redis refused the login: {error}; correct the user or password in OSTINATO_STORE_URL"
        ) from error
    except (RedisError, RedisClusterException) as error:
        raise Unavailable(
            f"the state store on Redis cannot be used: {error}{note}; try again, and check the Redis server, "
            "its memory, its disk and the network",
            retry_after_s=1.0,
        ) from error


def _warn_if_not_durable(client: redis.Redis) -> None:
    """Warn about what an acknowledged commit would not survive. Managed servers often forbid CONFIG."""
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
            else "the whole state is lost when it restarts",
        )
    elif settings.get("appendfsync") != "always":
        log.warning("Redis' appendfsync is not `always`: a power cut loses the last acknowledged commits")
    if settings.get("maxmemory-policy", "").startswith("allkeys-"):
        log.warning("Redis may evict the state when its memory is full; set `maxmemory-policy noeviction`")


def _warn_of_failovers(client: redis.Redis, replicas: int) -> None:
    """Warn if a replica may become the primary without the last acknowledged commits."""
    try:
        there = int(client.info("replication").get("connected_slaves", 0))
    except ResponseError as error:  # INFO is not allowed
        log.warning(
            "Redis forbids INFO to this user (%s): after a failover, revisions may be used twice, and every "
            "change reads the whole state; allow INFO, for example with `+info`",
            error,
        )
        return
    if there > 0 and not replicas:
        log.warning(
            "Redis has %d replicas, but commits are acknowledged before replicas have them: a failover loses "
            "the last commits; add ?replicas=1 to the store's URL",
            there,
        )
    if there < replicas:
        log.warning(
            "Redis has %d replicas, but the store's URL needs %d for each commit: no commit is acknowledged "
            "until the missing replicas connect",
            there,
            replicas,
        )


def _is_cluster(client: redis.Redis) -> bool:
    try:
        return bool(client.info("cluster").get("cluster_enabled"))
    except ResponseError:  # INFO is not allowed
        return False


def _entry(stored: str) -> Entry:
    version, _, value = stored.partition(":")
    return Entry(value, int(version))


def _arguments(write: Write | Require, place: int) -> tuple[int | str, ...]:
    if isinstance(write, Require):
        return (place, write.key, "", "2", write.value)
    expected = "" if write.expected_version is None else str(write.expected_version)
    return (place, write.key, expected, "0" if write.value is None else "1", write.value or "")


def _stale(write: Write | Require, version: int) -> StaleWrite:
    if isinstance(write, Require):
        return not_as_required(write)
    return StaleWrite(
        f"{write.kind} {write.key!r} is at version {version}, expected {write.expected_version} "
        "(0: absent); another process changed it: read it again",
        details={"kind": write.kind, "key": write.key, "version": version},
    )
