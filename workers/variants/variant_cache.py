"""What this rank holds of each variant, in host memory and on its device. Safe for use by threads.

Slots are somebody else's decision (the scheduler's, so that all ranks agree; without our scheduler,
`manager` takes them in turn). This carries out orders, and keeps the host's cache within its limit.
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
    """`slot_of` and `operations_of` tell, by uid, of the variants in slots."""

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
        """Have the variant in host memory. Blocking. Raises ValueError when it cannot be served here."""
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
        """Of this rank's device, for the variants in slots together."""
        return self._memory.capacity_bytes

    def holds(self, uid: int) -> bool:
        """Whether it is in host memory."""
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
        """Those used longest ago leave, down to the limit; the newest stays whatever its size."""
        forgotten = []
        while len(self._host) > 1 and self._held_bytes() > self._max_host_bytes:
            uid, variant = self._host.popitem(last=False)
            forgotten.append(variant)
            log.info("variant %d leaves host memory", uid)
        if not self._was_told and (kept := self._memory.staying_bytes()) > self._max_host_bytes:
            self._was_told = True
            log.warning(
                "embeddings of the variants in slots take %d bytes of host memory, where %d are set aside: no"
                " other variant is kept ready; give its base more (`ostinato tune MODEL --host-gib N`)",
                kept,
                self._max_host_bytes,
            )
        return forgotten

    def forget(self, uid: int) -> None:
        with self._lock:
            forgotten = [self._host.pop(uid)] if uid in self._host else []
        self._release(forgotten)

    def _release(self, forgotten: list[Any]) -> None:
        """Unlocking their pages takes time, which no request need wait for."""

        def release() -> None:
            with self._device():
                forgotten.clear()

        if not forgotten:
            return
        try:
            threading.Thread(target=release, name="variant-releasing").start()
        except RuntimeError:  # no thread can be begun: somebody waits
            release()

    def _device(self) -> AbstractContextManager[Any]:
        """Within, CUDA's calls of this thread go to this rank's device, not to the first one."""
        return torch.cuda.device(self._memory.arena.device) if self._pinned else nullcontext()

    @property
    def host_bytes(self) -> int:
        with self._lock:
            return self._held_bytes()

    def _held_bytes(self) -> int:
        """With what stays here of variants that are in slots and were forgotten."""
        held = self._host.values()
        return sum(variant.size_bytes for variant in held) + self._memory.staying_bytes(but=held)

    def in_host(self) -> dict[int, int]:
        """Bytes by uid."""
        with self._lock:
            return {uid: variant.size_bytes for uid, variant in self._host.items()}

    def staying(self) -> dict[int, int]:
        """Bytes by uid, of what slots keep here of variants that are not in host memory."""
        with self._lock:
            held = set(self._host)
        kept = {
            uid: self._memory.kept_bytes(slot) for uid, slot in [*self.slot_of.items()] if uid not in held
        }
        return {uid: size for uid, size in kept.items() if size}

    # --- device --------------------------------------------------------------------------------

    def place(self, uid: int, path: str, slot: int) -> int:
        """Have the variant in a slot that no step to come uses; returns its bytes on the device when steps
        may use it: see `settle`. Blocking.

        Raises ValueError (see `prepare`) and NoRoom.
        """
        variant = self.prepare(uid, path)
        with self._changing():
            if self.slot_of.get(uid) == slot:
                return variant.device_bytes
            if uid in self.slot_of:  # it moves
                self._clear(self.slot_of[uid])
            self._vacate(slot)
            self._memory.place(slot, variant)
            self._uid_in[slot] = uid
            self.operations_of[uid] = variant.operations
            self.slot_of[uid] = slot  # last: from here on batches may use it
            return variant.device_bytes

    def settle(self) -> None:
        """Wait until what was placed is on the device. Raises what goes wrong on the way."""
        with self._placing:
            self._memory.settle()

    def begin_step(self, uids: Collection[int]) -> None:
        """A step of these variants is begun next."""
        self._memory.uses.begin_step([self.slot_of[uid] for uid in uids])

    def clear(self, slot: int) -> None:
        with self._changing():
            self._clear(slot)

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """One at a time; what slots kept in host memory and need no more is let go afterwards."""
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
