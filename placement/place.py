"""Which devices carry a plan: most free memory first, one node per stage, never more than is free.

The simplest of MaverIQ's deployment rules (section 6): stages take devices by free memory, descending.
Load-aware selection and uneven layers grow here later.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from placement.types import Candidate, Device, Infeasible, Inventory, Placement, RankPlacement
from profiler.types import Basis

GIB = 2**30
CPU = "cpu"
_BASIS = {Basis.PROFILE: "from its profile:", Basis.ROUGH: "roughly, without a profile:"}

DeviceKey = tuple[str, str, int]
Seats = tuple[Device, ...]  # the device of each rank, by rank number


def key_of(device: Device) -> DeviceKey:
    """(node, kind, index): a host's CPU and its GPU 0 are two devices."""
    return device.node, device.kind, device.index


def place(
    candidate: Candidate, inventory: Inventory, taken: Mapping[DeviceKey, int] | None = None
) -> Placement | Infeasible:
    """Seat every rank on a device with room for it, or say what is lacking.

    `taken` are bytes already promised that `free_bytes` does not show yet. All ranks use devices of one
    kind: GPUs carry at most one rank each, a stage's ranks share a node, and one node holds the whole
    plan when it can; a CPU device holds all ranks or none. GPUs come before CPUs. When the ranks of a
    stage are equally large, a seating is found whenever there is one.
    """
    devices = _available(inventory, taken or {})
    for kind in _kinds(devices):
        group = [device for device in devices if device.kind == kind]
        seats = _seat_on_cpu(candidate, group) if kind == CPU else _seat_on_gpus(candidate, group)
        if seats is not None:
            return _placement(candidate, seats)
    return _infeasible(candidate, devices)


def place_best(
    ranked: Sequence[Candidate], inventory: Inventory, taken: Mapping[DeviceKey, int] | None = None
) -> Placement | Infeasible:
    """Place the first candidate that fits (MaverIQ, section 6, "Overview"); `ranked` is best first."""
    outcomes: list[Infeasible] = []
    for number, candidate in enumerate(ranked, start=1):
        outcome = place(candidate, inventory, taken)
        if isinstance(outcome, Placement):
            skipped = f" (choice {number} of {len(ranked)}; better ones do not fit)" if outcomes else ""
            return replace(outcome, reason=outcome.reason + skipped)
        outcomes.append(outcome)
    if not outcomes:
        return Infeasible("there is no plan to place")
    needs_total = all(device.kind == CPU for device in inventory.devices)
    sizes = [sum(c.estimate.memory_bytes) if needs_total else _largest_rank(c) for c in ranked]
    near = outcomes[sizes.index(min(sizes))]
    return Infeasible(
        f"none of {len(ranked)} plans fits; the least demanding: {near.reason}", near.relaxations
    )


def _available(inventory: Inventory, taken: Mapping[DeviceKey, int]) -> list[Device]:
    """Devices with what is really free, most free first; ties by node and index."""
    left = [replace(d, free_bytes=d.free_bytes - taken.get(key_of(d), 0)) for d in inventory.devices]
    return sorted(left, key=lambda d: (-d.free_bytes, key_of(d)))


def _kinds(devices: Iterable[Device]) -> list[str]:
    return sorted({device.kind for device in devices}, key=lambda kind: (kind == CPU, kind))


def _seat_on_cpu(candidate: Candidate, devices: Sequence[Device]) -> Seats | None:
    total = sum(candidate.estimate.memory_bytes)
    return next(((d,) * candidate.plan.world_size for d in devices if d.free_bytes >= total), None)


def _seat_on_gpus(candidate: Candidate, devices: Sequence[Device]) -> Seats | None:
    """One node if any can hold it all, in order of its freest device; else stages over many nodes."""
    nodes = list(dict.fromkeys(device.node for device in devices))
    for node in nodes:
        seats = _seat_stages(candidate, [d for d in devices if d.node == node])
        if seats is not None:
            return seats
    return _seat_stages(candidate, devices) if len(nodes) > 1 else None


def _seat_stages(candidate: Candidate, devices: Sequence[Device]) -> Seats | None:
    """The largest stage first. Whatever suits it suits all later ones too, so no choice is regretted."""
    plan, unused = candidate.plan, list(devices)
    stages: dict[int, Seats] = {}
    for stage in sorted(range(plan.pipeline_parallel), key=lambda s: (-_need(candidate, s), s)):
        seats = _seat_stage(plan.tensor_parallel, _need(candidate, stage), unused)
        if seats is None:
            return None
        stages[stage] = seats
        unused = [device for device in unused if device not in seats]
    return tuple(device for stage in sorted(stages) for device in stages[stage])


def _seat_stage(width: int, need: int, unused: Sequence[Device]) -> Seats | None:
    """`width` devices of one node, each with `need` bytes free: the freest of the first such node."""
    fitting = [device for device in unused if device.free_bytes >= need]
    for node in dict.fromkeys(device.node for device in fitting):
        here = [device for device in fitting if device.node == node]
        if len(here) >= width:
            return tuple(here[:width])
    return None


def _need(candidate: Candidate, stage: int) -> int:
    """Bytes of the stage's largest rank."""
    tp = candidate.plan.tensor_parallel
    return max(candidate.estimate.memory_bytes[stage * tp : (stage + 1) * tp])


def _largest_rank(candidate: Candidate) -> int:
    return max(candidate.estimate.memory_bytes)


def _placement(candidate: Candidate, seats: Seats) -> Placement:
    plan = candidate.plan
    ranks, start = [], 0
    for stage, layers in enumerate(plan.layers_per_stage):
        for tp_rank in range(plan.tensor_parallel):
            rank = stage * plan.tensor_parallel + tp_rank
            ranks.append(
                RankPlacement(
                    rank=rank,
                    stage=stage,
                    tp_rank=tp_rank,
                    node=seats[rank].node,
                    device_index=seats[rank].index,
                    device_kind=seats[rank].kind,
                    layer_start=start,
                    layer_end=start + layers,
                    memory_bytes=candidate.estimate.memory_bytes[rank],
                )
            )
        start += layers
    return Placement(plan, tuple(ranks), candidate.estimate, _reason(candidate, seats))


def _reason(candidate: Candidate, seats: Seats) -> str:
    plan, cost = candidate.plan, candidate.estimate
    places = ", ".join(dict.fromkeys(f"{d.kind} {d.index} of {d.node}" for d in seats))
    free = sum(d.free_bytes for d in {key_of(d): d for d in seats}.values())
    return (
        f"TP={plan.tensor_parallel} x PP={plan.pipeline_parallel} on {places}: "
        f"{sum(cost.memory_bytes) / GIB:.2f} of {free / GIB:.2f} GiB free; "
        f"predicted {_BASIS[cost.basis]} TTFT {cost.ttft_s * 1e3:.3g} ms, TPOT {cost.tpot_s * 1e3:.3g} ms"
    )


def _infeasible(candidate: Candidate, devices: Sequence[Device]) -> Infeasible:
    plan = candidate.plan
    shape = f"TP={plan.tensor_parallel} x PP={plan.pipeline_parallel}"
    if not devices:
        return Infeasible(
            f"{shape} needs {plan.world_size} devices, but the cluster has none", ("add a device",)
        )
    each, total = _largest_rank(candidate) / GIB, sum(candidate.estimate.memory_bytes) / GIB
    free = ", ".join(
        f"{max(0, d.free_bytes) / GIB:.2f} on {d.kind} {d.index} of {d.node}" for d in devices[:4]
    )
    more = f" and {len(devices) - 4} smaller" if len(devices) > 4 else ""
    return Infeasible(
        f"{shape} needs {plan.world_size} GPUs with up to {each:.2f} GiB free each, "
        f"{plan.tensor_parallel} to a node, or a CPU host with {total:.2f} GiB; free GiB are {free}{more}",
        _relaxations(candidate, devices),
    )


def _relaxations(candidate: Candidate, devices: Sequence[Device]) -> tuple[str, ...]:
    cpus = [device for device in devices if device.kind == CPU]
    gpus = [device for device in devices if device.kind != CPU]
    total, world = sum(candidate.estimate.memory_bytes), candidate.plan.world_size
    hints = []
    if cpus:
        hints.append(
            f"free {(total - cpus[0].free_bytes) / GIB:.2f} GiB on cpu {cpus[0].index} of {cpus[0].node}"
        )
    if gpus:
        fit = sum(device.free_bytes >= _largest_rank(candidate) for device in gpus)
        hints.append(f"give {world} GPUs {_largest_rank(candidate) / GIB:.2f} GiB free each; {fit} have it")
    return (*hints, "undeploy a model, or ask for a shorter context or less concurrency")
