"""How a group is split into launches of vLLM, and the arguments of each: pure functions.

vLLM (0.26 to 0.32) runs a group on several nodes as one launch per node, with the same number of ranks in
each (`--nnodes`, `--node-rank`). A plan may put two ranks here and one there; then one node has several
launches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from math import gcd

from profiler.types import CPU
from workers.messages import EngineConfig, RankConfig


@dataclass(frozen=True)
class Member:
    """One launch: vLLM's node rank `number`, with `ranks` of the group on `node`.

    `gpus` are their indices on that node, in the order of ranks; none on a CPU.
    """

    number: int
    node: str
    ranks: tuple[int, ...]
    gpus: tuple[int, ...]


@dataclass(frozen=True)
class Rendezvous:
    """The meeting point of a group's members: the node of rank 0, which the others must be able to reach.

    `bus` is the scheduler's address for the ranks' variant loaders, with its token.
    """

    address: str
    port: int
    bus: str


def members_of(config: EngineConfig) -> tuple[Member, ...]:
    """The launches of a group, rank 0's first. Raises ValueError for a group that cannot run."""
    check(config)
    ranks = config.ranks
    runs = [len(list(run)) for _, run in groupby(ranks, key=lambda rank: rank.node)]
    size = gcd(*runs)
    starts = [0] if len(runs) == 1 else range(0, len(ranks), size)
    size = len(ranks) if len(runs) == 1 else size
    return tuple(_member(number, start, ranks[start : start + size]) for number, start in enumerate(starts))


def _member(number: int, start: int, ranks: Sequence[RankConfig]) -> Member:
    gpus = tuple(rank.device_index for rank in ranks if rank.device_kind != CPU)
    return Member(number, ranks[0].node, tuple(range(start, start + len(ranks))), gpus)


def check(config: EngineConfig) -> None:
    """Raises ValueError, with the error, for ranks that do not form a group."""
    tp, ranks = config.tensor_parallel, config.ranks
    if tp < 1 or not ranks or len(ranks) % tp:
        raise ValueError(f"expected a positive multiple of {tp} ranks (a stage has {tp}), got {len(ranks)}")
    for stage in range(len(ranks) // tp):
        layers = {rank.layers for rank in ranks[stage * tp : (stage + 1) * tp]}
        if len(layers) > 1:
            raise ValueError(
                f"the ranks of stage {stage} have {sorted(layers)} layers; expected the same in all"
            )
    kinds = {rank.device_kind == CPU for rank in ranks}
    if len(kinds) > 1:
        raise ValueError("expected all ranks of a group on GPUs or all on CPUs, got both")
    seen: set[tuple[str, int]] = set()
    for number, rank in enumerate(ranks):
        place = (rank.node, rank.device_index)
        if config.on_gpu and place in seen:
            raise ValueError(
                f"rank {number} shares GPU {rank.device_index} of {rank.node or 'its node'} with another "
                "rank of its group, which NCCL does not allow; place the ranks on different GPUs"
            )
        seen.add(place)


def network_arguments(
    members: Sequence[Member], number: int, rendezvous: Rendezvous | None
) -> dict[str, str | int]:
    """vLLM's arguments for the launch `number` among `members`; none for a single launch."""
    if len(members) == 1:
        return {}
    if rendezvous is None:
        raise ValueError(f"a group of {len(members)} launches needs a place where they meet")
    return {
        "--nnodes": len(members),
        "--node-rank": number,
        "--master-addr": rendezvous.address,
        "--master-port": rendezvous.port,
    }


def device_environment(member: Member) -> dict[str, str]:
    """The environment in which CUDA's device i is the GPU of the member's i-th rank. Indices are the driver's
    (NVML's).
    """
    return visible_gpus(member.gpus) if member.gpus else {}


def visible_gpus(gpus: Sequence[int]) -> dict[str, str]:
    """The environment in which CUDA has these GPUs, in this order.

    Indices are the driver's; CUDA numbers GPUs differently by default.
    """
    return {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": ",".join(map(str, gpus))}
