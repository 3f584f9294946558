"""This rank's copies of each variant, in host memory and on its device. Thread-safe.

Another component chooses slots: the scheduler, so that all ranks agree, or `manager`, in turn, without our
scheduler. This class carries out orders, and keeps the host's cache within its limit.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch

from workers.variants.device import DeviceMemory
from workers.variants.host import HostVariant, Room, pack
from workers.variants.layer_weights import Contents
from workers.variants.loader_threads import LoaderThreads
from workers.variants.shapes import LayerShape
from workers.variants.tensors import Buffers

log = logging.getLogger(__name__)


class VariantCache:
    """The cache of variants. `slot_of` and `operations_of` have, by uid, the variants in slots."""

    def __init__(
        self,
        opener: Callable[[Path], Contents],
        memory: DeviceMemory,
        layers: Sequence[LayerShape],
        dtype: torch.dtype,
        host_bytes: int,
        threads: LoaderThreads | None = None,
    ) -> None:
        self._open = opener
        self._max_host_bytes = host_bytes
        self._memory = memory
        self._layers = layers
        self._dtype = dtype
        self._threads = threads
        self._buffers = Buffers()
        self._pinned = memory.arena.device.type == "cuda"
        self._host: OrderedDict[int, HostVariant] = OrderedDict()
        self._reading: dict[int, threading.Lock] = {}
        self._lock = threading.Lock()
        self._placing = threading.Lock()
        self._was_told = False  # that host memory is too small
        self._uid_in: dict[int, int] = {}
        self.slot_of: dict[int, int] = {}
        self.operations_of: dict[int, frozenset[str]] = {}

    # --- host ----------------------------------------------------------------------------------

    def prepare(self, uid: int, path: str) -> HostVariant:
        """Load the variant into host memory. Blocking. Raises ValueError if it cannot be served here."""
        with self._lock:
            lock = self._reading.setdefault(uid, threading.Lock())
        with lock:
            try:
                return self._held(uid) or self._keep(uid, self._read(path))
            finally:
                with self._lock:
                    self._reading.pop(uid, None)

    def _held(self, uid: int) -> HostVariant | None:
        with self._lock:
            if uid in self._host:
                self._host.move_to_end(uid)
            return self._host.get(uid)

    def _keep(self, uid: int, variant: HostVariant) -> HostVariant:
        with self._lock:
            self._host[uid] = variant
            forgotten = self._shrink_host()
        self._release(forgotten)
        return variant

    @property
    def capacity_bytes(self) -> int:
        """The device memory of this rank for the variants in all slots together."""
        return self._memory.capacity_bytes

    def holds(self, uid: int) -> bool:
        """Whether the variant is in host memory."""
        with self._lock:
            return uid in self._host

    def streams(self, uid: int) -> bool:
        """Whether it is in host memory, and may run as soon as its copy to the device has begun."""
        with self._lock:
            variant = self._host.get(uid)
        return variant is not None and self._memory.streams(variant)

    def _read(self, path: str) -> HostVariant:
        with self._device():
            variant = pack(
                self._open(Path(path)),
                self._layers,
                self._dtype,
                self._pinned,
                self._threads,
                Room(self._memory.capacity_bytes, self._memory.reads_host),
                self._buffers,
            )
        self._memory.describe(variant)
        return variant

    def _shrink_host(self) -> list[HostVariant]:
        """Evict the least recently used variants, down to the limit; the newest stays whatever its size."""
        forgotten = []
        while len(self._host) > 1 and self._held_bytes() > self._max_host_bytes:
            uid, variant = self._host.popitem(last=False)
            forgotten.append(variant)
            log.info("variant %d leaves host memory", uid)
        if not self._was_told and (kept := self._memory.staying_bytes()) > self._max_host_bytes:
            self._was_told = True
            log.warning(
                "embeddings of the variants in slots take %d bytes of host memory, but only %d are reserved: "
                "no other variant stays ready; raise it with `ostinato tune MODEL --host-gib N`",
                kept,
                self._max_host_bytes,
            )
        return forgotten

    def forget(self, uid: int) -> None:
        with self._lock:
            forgotten = [self._host.pop(uid)] if uid in self._host else []
        self._release(forgotten)

    def _release(self, forgotten: list[Any]) -> None:
        """Release variants in a thread: unlocking their pages takes time, and no request needs to wait for
        it.
        """

        def release() -> None:
            with self._device():
                forgotten.clear()

        if not forgotten:
            return
        try:
            threading.Thread(target=release, name="variant-releasing").start()
        except RuntimeError:  # no thread can be started: the caller waits
            release()

    def _device(self) -> AbstractContextManager[Any]:
        """Within the context, CUDA calls of this thread go to this rank's device, not to the first device."""
        return torch.cuda.device(self._memory.arena.device) if self._pinned else nullcontext()

    @property
    def host_bytes(self) -> int:
        with self._lock:
            return self._held_bytes()

    def _held_bytes(self) -> int:
        """Bytes in host memory, with the parts here of variants that are in slots but were forgotten."""
        held = self._host.values()
        return sum(variant.size_bytes for variant in held) + self._memory.staying_bytes(but=held)

    def in_host(self) -> dict[int, int]:
        """Bytes in host memory, by uid."""
        with self._lock:
            return {uid: variant.size_bytes for uid, variant in self._host.items()}

    def staying(self) -> dict[int, int]:
        """Bytes, by uid, that slots keep here of variants that are not in host memory."""
        with self._lock:
            held = set(self._host)
        kept = {
            uid: self._memory.kept_bytes(slot) for uid, slot in [*self.slot_of.items()] if uid not in held
        }
        return {uid: size for uid, size in kept.items() if size}

    # --- device --------------------------------------------------------------------------------

    def place(self, uid: int, path: str, slot: int) -> int:
        """Place the variant into a slot that no later step uses before this returns. Blocking.

        Returns its bytes on the device once steps may use it: see `settle`. Raises ValueError (see `prepare`)
        and NoRoom.
        """
        variant = self.prepare(uid, path)
        with self._changing():
            if self.slot_of.get(uid) == slot:
                return variant.device_bytes
            if uid in self.slot_of:  # it moves to another slot
                self._clear(self.slot_of[uid])
            self._vacate(slot)
            self._memory.place(slot, variant)
            self._uid_in[slot] = uid
            self.operations_of[uid] = variant.operations
            self.slot_of[uid] = slot  # last: from here on batches may use it
            return variant.device_bytes

    def settle(self) -> None:
        """Wait until placed variants are on the device. Raises the error of a failed copy."""
        with self._placing:
            self._memory.settle()

    def begin_step(self, uids: Collection[int]) -> None:
        """Record that the next step uses these variants."""
        self._memory.uses.begin_step([self.slot_of[uid] for uid in uids])

    def clear(self, slot: int) -> None:
        with self._changing():
            self._clear(slot)

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """Serialise changes; afterwards, release the host memory that slots no longer need."""
        with ExitStack() as afterwards, self._placing:
            try:
                yield
            finally:
                afterwards.callback(self._release, self._memory.left())

    def _clear(self, slot: int) -> None:
        self._vacate(slot)
        self._memory.clear(slot)

    def _vacate(self, slot: int) -> None:
        uid = self._uid_in.pop(slot, None)
        if uid is not None:
            self.slot_of.pop(uid, None)
            self.operations_of.pop(uid, None)
