"""One worker of a base as a gateway knows it: its address, its load, its health, the connections to it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from controlplane import errors
from controlplane.gateway.load_reader import LoadReader
from controlplane.traffic import worker_health
from controlplane.traffic.member import Member
from controlplane.traffic.worker_health import Seen
from workers.http1.client import Connection, Moved, Pool
from workers.messages import WorkerLoad


@dataclass(eq=False, kw_only=True)
class KnownWorker(Member):
    """One worker's address, the connections to it, and how many requests of this gateway it has.

    `load` is the load that the worker last pushed, at `load_at_s` (time.monotonic); None if it never did.
    `seen` is what is known of its health; `is_probed`: a probe of its health is under way; `good` counts
    answers without a fault; `unloaded` are variants that it failed to load since it last answered a request
    for a variant. `held` are variants in its memory; `announced_s` is when a variant was last announced.
    """

    address: str
    secret: str = field(repr=False)
    proof: str = field(default="", repr=False)
    local_name: str = field(default="", repr=False)
    outstanding: int = 0
    load: WorkerLoad | None = field(default=None, repr=False)
    load_at_s: float = -math.inf
    seen: Seen = field(default_factory=Seen)
    is_probed: bool = False
    good: int = 0
    unloaded: set[int] = field(default_factory=set, repr=False)
    held: frozenset[int] = frozenset()
    announced_s: float = -math.inf
    listens: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self.name = self.address
        self.pool = Pool(self.address, self.local_name)
        self._used: set[Connection] = set()
        self._reader: LoadReader | None = None

    def listen(self, on_load: Callable[[KnownWorker, WorkerLoad], None]) -> None:
        """Keep `load` current from now on, and call `on_load` for each new load."""

        def take(load: WorkerLoad) -> None:
            if self.load is None or self.load.variants != load.variants:
                self.held = frozenset(uid for uid, _ in load.variants)
            self.load, self.load_at_s = load, time.monotonic()
            if self.seen.quiet != 0:
                self.seen = worker_health.reported(self.seen)
            on_load(self, load)

        self._reader = LoadReader(self.address, self.secret, take, self.proof)
        self.listens = True

    def forget(self, listen_on: bool = False) -> None:
        """End the background tasks. Requests under way go on. `listen_on`: keep listening for the load,
        until the next call without."""
        self.pool.close()
        if self._reader is not None and not listen_on:
            self._reader.close()
            self.listens = False

    def cut(self) -> None:
        """End the requests in flight at this worker: they fail with BrokenOff."""
        for connection in self._used:
            connection.abort()

    def move(self) -> None:
        """Send requests without an answer so far to other workers: they fail with Moved."""
        for connection in self._used:
            if connection.may_move and not connection.has_begun:
                connection.end(Moved())

    def give_up(self, error: errors.OstinatoError) -> None:
        """End the requests whose answer has begun, with this error. Other requests may still get an
        answer."""
        for connection in self._used:
            if connection.has_begun:
                connection.end(error)

    async def take(self) -> Connection:
        """A connection for one request, to be given back in every case. Raises NotConnected."""
        self.outstanding += 1
        try:
            connection = await self.pool.take()
        except BaseException:
            self.outstanding -= 1
            raise
        self._used.add(connection)
        return connection

    def give_back(self, connection: Connection) -> None:
        """Keep the connection for the next request; close it unless its answer was read to the end."""
        self.outstanding -= 1
        self._used.discard(connection)
        self.pool.give_back(connection)
