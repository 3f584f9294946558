"""Sends the sampled tokens to a pipeline's earlier stages without using a part of their GPUs.

In vLLM every stage but the last launches NCCL's broadcast of a step's tokens as soon as the stage has passed
the step on. The broadcast waits there for the last stage, on a multiprocessor that the stage's next step then
lacks (docs/profiler-how-it-works.md). Here the last stage's GPU copies the tokens to memory that the
processes of a node share, and counts. The other GPUs wait for that count in their streams, which takes no
multiprocessor. It is a torch process group that replaces vLLM's. Stages on several nodes, and devices other
than CUDA GPUs, keep vLLM's group.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist

from workers.group import shared_ring
from workers.group.shared_ring import Counts, Layout, Ring
from workers.kernels.nvrtc import checked
from workers.patches.vllm import token_broadcast as patch

log = logging.getLogger(__name__)

BACKEND = "ostinato_shared_memory"
PLACES = 16  # two or three per step; a pipeline has as many steps in flight as stages
TOKEN_BYTES = 8
_PORTABLE_MAPPED = 3  # flags of cuMemHostRegister


class SharedMemoryGroup(dist.ProcessGroup):
    """Broadcasts from its last process, in the order of the current stream of the tensor's device."""

    def __init__(self, process: int, processes: int) -> None:
        super().__init__(process, processes)  # type: ignore[call-arg]  # torch's stub lacks it
        self._ring: Ring | None = None

    def use(self, ring: Ring) -> None:
        self._ring = ring

    def broadcast(self, tensors: Sequence[torch.Tensor], options: Any) -> None:  # type: ignore[override]
        """Broadcast tensors. Errors: ValueError for another sender than the last process, and for too large a
        tensor.
        """
        if self._ring is None or options.rootRank != self.size() - 1:
            raise ValueError(f"expected a broadcast of process {self.size() - 1}, got {options.rootRank}")
        for tensor in tensors:
            self._ring.pass_on(tensor)

    def getBackendName(self) -> str:  # noqa: N802  # torch calls it
        return BACKEND


class Locked(Counts, Protocol):
    """Counts in memory that a device has locked until `close`."""

    def close(self) -> None: ...


class StreamCounts:
    """Counts in page-locked memory; a GPU waits for them and writes them in its current stream."""

    def __init__(self, memory: torch.Tensor) -> None:
        """Lock and map the memory. Raises RuntimeError if the driver cannot."""
        from cuda.bindings import driver  # after an error of the runtime's own call, torch would fail later

        self._driver, self._memory = driver, memory
        checked(driver.cuMemHostRegister(memory.data_ptr(), memory.numel(), _PORTABLE_MAPPED))
        try:
            self._address = int(checked(driver.cuMemHostGetDevicePointer(memory.data_ptr(), 0)))
        except RuntimeError:
            self.close()
            raise

    def close(self) -> None:
        """Unlock the memory, before it is unmapped and once no work in the current stream uses it."""
        checked(self._driver.cuStreamSynchronize(self._stream()))
        checked(self._driver.cuMemHostUnregister(self._memory.data_ptr()))

    def wait(self, at: int, number: int) -> None:
        flag = self._driver.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_GEQ  # for a count that wraps
        checked(self._driver.cuStreamWaitValue32(self._stream(), self._address + at, number, flag))

    def write(self, at: int, number: int) -> None:
        """Write the count; the driver makes earlier writes visible first, which is this flag's default."""
        flag = self._driver.CUstreamWriteValue_flags.CU_STREAM_WRITE_VALUE_DEFAULT
        checked(self._driver.cuStreamWriteValue32(self._stream(), self._address + at, number, flag))

    def _stream(self) -> int:
        return torch.cuda.current_stream().cuda_stream


def install(handler: Any = None) -> None:
    """Replace the broadcast in a rank's process on a GPU, before its model runner is built.

    `handler` is the class of vLLM's handlers; without it, vLLM's.
    """
    patch.install(_group_for, handler)


def _group_for(
    max_num_reqs: int, num_speculative_steps: int, device: torch.device
) -> dist.ProcessGroup | None:
    """The group for a handler of vLLM's; None: vLLM's group."""
    if device.type != "cuda":
        return None
    from vllm.distributed.parallel_state import get_pp_group

    pipeline = get_pp_group()
    size = TOKEN_BYTES * max_num_reqs * (1 + num_speculative_steps)
    return shared_group(pipeline.group_ranks, pipeline.cpu_group, size, StreamCounts)


def shared_group(
    all_ranks: Sequence[Sequence[int]],
    beside: dist.ProcessGroup,
    place_bytes: int,
    counts: Callable[[torch.Tensor], Locked],
) -> SharedMemoryGroup | None:
    """A group of the processes of the given group, which can pass objects; None, in all of them, without
    shared memory.

    Every process of the world must call this, with the ranks of all such groups.

    `counts(memory)` makes the `Locked` of this process. Raises no error that only some processes would raise.
    """
    if getattr(dist.group.WORLD, "bound_device_id", None) is not None:
        return None  # torch would expect the features of NCCL's groups
    if not hasattr(dist.Backend, BACKEND.upper()):
        dist.Backend.register_backend(BACKEND, _made, devices=["cuda", "cpu"])
    groups = [dist.new_group(list(ranks), backend=BACKEND) for ranks in all_ranks]
    (own,) = (group for group in groups if isinstance(group, SharedMemoryGroup))
    process, processes = own.rank(), own.size()
    layout = Layout(processes, PLACES, -(-place_bytes // shared_ring.LINE) * shared_ring.LINE)
    memory = _shared(layout, beside)
    locked = None if memory is None else _locked(memory, layout, process, counts)
    if not _all(locked is not None, beside):
        log.info("vLLM broadcasts the tokens of a pipeline, because its stages share no memory")
        if locked is not None:
            locked.close()
        return None
    assert memory is not None
    assert locked is not None
    own.use(Ring(process, processes - 1, layout, memory, locked))
    return own


def _locked(
    memory: torch.Tensor, layout: Layout, process: int, counts: Callable[[torch.Tensor], Locked]
) -> Locked | None:
    """None if the device cannot wait for this memory, or write to it."""
    try:
        locked = counts(memory)
    except Exception as error:  # for any error: the others wait for the result
        log.warning("a GPU cannot use memory that is shared between stages: %s", error)
        return None
    try:
        locked.wait(layout.WRITTEN, 0)
        locked.write(layout.read(process), 0)
    except Exception as error:
        log.warning("a GPU cannot wait for memory that is shared between stages: %s", error)
        locked.close()
        return None
    return locked


def _made(store: Any, process: int, processes: int, timeout: Any) -> SharedMemoryGroup:
    return SharedMemoryGroup(process, processes)


def _shared(layout: Layout, beside: dist.ProcessGroup) -> torch.Tensor | None:
    """Memory that the first process creates; None if this process cannot map it."""
    name: str | None = None
    first = dist.get_rank(beside) == 0
    try:
        if first:
            name = _created(layout.size_bytes)
        names = [name]
        dist.broadcast_object_list(names, group=beside, group_src=0)
        found = None if names[0] is None else _mapped(names[0], layout.size_bytes)
        dist.barrier(beside)
    finally:
        if name is not None:
            shared_ring.unlink(name)
    return found


def _created(size: int) -> str | None:
    try:
        return shared_ring.create(size)
    except OSError as error:
        log.warning("no memory to share between a pipeline's stages: %s", error)
        return None


def _mapped(name: str, size: int) -> torch.Tensor | None:
    try:
        return shared_ring.mapped(name, size)
    except OSError:
        return None


def _all(here: bool, beside: dist.ProcessGroup) -> bool:
    told: list[Any] = [None] * dist.get_world_size(beside)
    dist.all_gather_object(told, here, group=beside)
    return all(told)
