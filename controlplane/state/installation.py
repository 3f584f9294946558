"""The installation that a store belongs to, and the store as used by that installation's processes.

A store has an identity: an entry that is written once, in an empty store or in a store without an identity
(from an earlier version). Engines get it when they are launched. A store is not theirs if it is empty while
engines run, or has another identity: its data were lost or replaced, or settings name another store. Then
nothing is read from it or written to it: nothing is stopped, nothing acknowledged.
"""

from __future__ import annotations

import logging
import secrets
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager

from controlplane.errors import StaleWrite, Unavailable
from controlplane.state.base import Changes, Entry, Lease, Require, Snapshot, StateStore, Write

log = logging.getLogger(__name__)

KIND, KEY = "installation", "identity"
TRY_AGAIN_S = 5.0
_WHAT_TO_DO = (
    "Engines keep running, and no change is accepted. Restore the store that the engines were started from "
    "(its file, its server's data, or OSTINATO_STORE_URL). To use the present store instead, end the "
    "engines: run `ostinato down`, then `ostinato up`; in your own Ray cluster, stop the cluster and start "
    "it again"
)


class NotOwn(Unavailable):
    """The store belongs to another installation than the running engines."""

    def __init__(self, what: str) -> None:
        super().__init__(f"{what}. {_WHAT_TO_DO}", retry_after_s=TRY_AGAIN_S)


class Missing(Unavailable):
    def __init__(self, path: str) -> None:
        super().__init__(f"the state file {path} does not exist", retry_after_s=TRY_AGAIN_S)


def identity_of(store: StateStore) -> str:
    """The store's identity; empty: it has none."""
    entry = store.get(KIND, KEY)
    return entry.value if entry else ""


def require_theirs(identity: str, is_empty: bool, running: Collection[str]) -> None:
    """Check that a store with this identity ("": none yet) may belong to engines that the installations
    `running` launched. Engines of earlier versions, without identities, have "".

    Errors: NotOwn.
    """
    others = sorted(set(running) - {"", identity})
    if others:
        whose = f"installation {identity}" if identity else "no installation yet"
        raise NotOwn(f"engines of installation {others[0]} run, but the state store belongs to {whose}")
    if running and not identity and is_empty:
        raise NotOwn("engines run, but the state store is empty")


class OwnStore:
    """The store that `opened` gives, after a check that it belongs to the running engines.

    `opened(must_exist)` opens it, `running` gives the identities of the engines' installations; both block.
    Until the check has succeeded, each call tries again.

    Errors of all methods: `NotOwn`, and those of `StateStore`.
    """

    def __init__(self, opened: Callable[[bool], StateStore], running: Callable[[], Collection[str]]) -> None:
        self._opened = opened
        self._running = running
        self._lock = threading.Lock()
        self._own: StateStore | None = None
        self._identity = ""

    def claim(self) -> StateStore:
        """The store, checked and with an identity."""
        if (own := self._own) is not None:
            return own
        with self._lock:
            if self._own is None:
                running = self._running()
                store = self._open(bool(running))
                try:
                    self._identity = _identified(store, running)
                except BaseException:
                    store.close()
                    raise
                self._own = store
            return self._own

    def _open(self, engines_run: bool) -> StateStore:
        try:
            return self._opened(engines_run)
        except Missing as e:
            raise NotOwn(f"engines run, but {e.message}") from e

    def revision(self) -> int:
        return self.claim().revision()

    def snapshot(self, kinds: Sequence[str]) -> Snapshot:
        found = self.claim().snapshot([*kinds, KIND])
        self._require_same(found.entries[KIND].get(KEY))
        return Snapshot(found.revision, {kind: found.entries[kind] for kind in kinds})

    def changes(self, kinds: Sequence[str], since: int) -> Changes | None:
        found = self.claim().changes([*kinds, KIND], since)
        if found is None:
            return None
        if (changed := found.entries.get(KIND)) is not None:
            self._require_same(changed.get(KEY))
        return Changes(found.revision, {kind: found.entries[kind] for kind in kinds if kind in found.entries})

    def get(self, kind: str, key: str) -> Entry | None:
        return self.claim().get(kind, key)

    def pages(self, kind: str) -> Iterator[Mapping[str, Entry]]:
        return self.claim().pages(kind)

    def commit(self, writes: Sequence[Write | Require], lease: Lease | None = None) -> int:
        store = self.claim()
        if not writes:
            return store.revision()
        with self._telling():
            return store.commit([Require(KIND, KEY, self._identity), *writes], lease)

    def take_lease(self, name: str, holder: str, seconds: float, gone: str | None = None) -> Lease:
        return self.claim().take_lease(name, holder, seconds, gone)

    def release_lease(self, lease: Lease) -> None:
        self.claim().release_lease(lease)

    def close(self) -> None:
        with self._lock:
            if self._own is not None:
                self._own.close()

    @contextmanager
    def _telling(self) -> Iterator[None]:
        try:
            yield
        except StaleWrite as e:
            if e.details.get("kind") == KIND:
                raise self._lost() from e
            raise

    def _require_same(self, entry: Entry | None) -> None:
        if entry is None or entry.value != self._identity:
            raise self._lost()

    def _lost(self) -> NotOwn:
        return NotOwn(f"the state store lost the records of installation {self._identity}, or was replaced")


def _identified(store: StateStore, running: Collection[str]) -> str:
    """The identity of a store, which is created if it has none. Errors: NotOwn."""
    while True:
        identity, is_empty = identity_of(store), store.revision() == 0
        require_theirs(identity, is_empty, running)
        if identity:
            return identity
        try:
            store.commit([Write(KIND, KEY, secrets.token_hex(8), 0)])
        except StaleWrite:
            continue  # another process was faster
        log.info("the state store now belongs to installation %s", identity_of(store))
