"""A rank's loader: carries out the scheduler's orders about variants, while batches run."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

from workers.bus.faults import fault_of
from workers.bus.sockets import Message, RankSocket
from workers.scheduling import residency
from workers.variant_config import ADDRESS_VARIABLE
from workers.variants.device import NoRoom

log = logging.getLogger(__name__)

READERS = 2


class Sized(Protocol):
    @property
    def device_bytes(self) -> int: ...


class Cache(Protocol):
    """The methods of `VariantCache` that a loader uses, on variants in host memory and in slots."""

    def prepare(self, uid: int, path: str) -> Sized: ...

    def place(self, uid: int, path: str, slot: int) -> int: ...

    def settle(self) -> None: ...

    def clear(self, slot: int) -> None: ...

    def forget(self, uid: int) -> None: ...

    def holds(self, uid: int) -> bool: ...

    @property
    def capacity_bytes(self) -> int: ...

    def streams(self, uid: int) -> bool: ...

    def in_host(self) -> dict[int, int]: ...

    def staying(self) -> dict[int, int]: ...


class Loader:
    """Reads variants in a few threads (several at once), and places them one after the other.

    Variants that requests wait for are read at the same time as those that are only prepared. An order about
    a slot is dropped if a newer one arrives while its variant is read.
    """

    def __init__(self, address: str, rank: int, variant_cache: Cache) -> None:
        self._rank = rank
        self._variant_cache = variant_cache
        self._readers = ThreadPoolExecutor(READERS, "variant-reader")
        self._urgent = ThreadPoolExecutor(READERS, "variant-loader")
        self._placer = ThreadPoolExecutor(1, "variant-placer")
        self._newest: dict[int, int] = {}  # by slot: its newest order
        self._socket = RankSocket(address, f"rank-{rank}", self._received)
        self._socket.send({"did": "hello", "rank": rank, "capacity": variant_cache.capacity_bytes})

    @classmethod
    def connect(cls, rank: int, variant_cache: Cache) -> Loader | None:
        """The loader of this rank, if one of our schedulers listens."""
        address = os.environ.get(ADDRESS_VARIABLE)
        return cls(address, rank, variant_cache) if address else None

    def _received(self, message: Message) -> None:
        match message["do"]:
            case residency.PREPARE:
                self._readers.submit(self._report, message, self._prepare)
            case residency.PLACE:
                self._newest[message["slot"]] = message["order"]
                if self._variant_cache.holds(message["uid"]):
                    self._placer.submit(self._place_and_settle, message)
                else:
                    self._urgent.submit(self._report, message, self._read_then_place)
            case residency.CLEAR:
                self._newest[message["slot"]] = message["order"]
                self._placer.submit(self._variant_cache.clear, message["slot"])
            case residency.FORGET:  # after the variant has left its slot
                self._placer.submit(self._variant_cache.forget, message["uid"])

    def _prepare(self, message: Message) -> Message | None:
        made = self._variant_cache.prepare(message["uid"], message["path"])
        return {"did": residency.PREPARED, "bytes": made.device_bytes, **self._streams(message)}

    def _read_then_place(self, message: Message) -> Message | None:
        self._variant_cache.prepare(message["uid"], message["path"])
        self._placer.submit(self._place_and_settle, message)
        return None

    def _place_and_settle(self, message: Message) -> None:
        """Place a variant and report it, then wait for its arrival.

        Steps may use the variant once it is reported, which may be before it has arrived. If it does not
        arrive, a failure of the same order is reported.
        """
        self._report(message, self._place)
        self._report(message, self._settle)

    def _place(self, message: Message) -> Message | None:
        if self._newest[message["slot"]] != message["order"]:
            return None
        placed = self._variant_cache.place(message["uid"], message["path"], message["slot"])
        return {"did": residency.PLACED, "bytes": placed, **self._streams(message)}

    def _settle(self, message: Message) -> None:
        self._variant_cache.settle()

    def _streams(self, message: Message) -> Message:
        return {"streams": self._variant_cache.streams(message["uid"])}

    def _report(self, message: Message, work: Callable[[Message], Message | None]) -> None:
        """Do the work, and report its outcome to the scheduler."""
        about: dict[str, Any] = {"rank": self._rank, "uid": message["uid"], "slot": message.get("slot")}
        about["order"] = message["order"]
        started = time.monotonic()
        try:
            done = work(message)
        except NoRoom as e:
            done = {"did": residency.NO_ROOM, "bytes": e.size_bytes, "error": str(e)}
        except Exception as e:
            log.warning("variant %d could not be loaded: %r", message["uid"], e)
            done = {"did": residency.FAILED, "error": str(e) or type(e).__name__, "fault": fault_of(e)}
        if done is not None:
            held = {"host": self._variant_cache.in_host(), "staying": self._variant_cache.staying()}
            self._socket.send({**about, **done, **held, "took_s": time.monotonic() - started})
