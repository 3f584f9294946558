"""The solver's clusters from an inventory's devices: one per GPU type, and one for CPU hosts. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import reduce

from placement.solver.cluster import Cluster, Gpu, GpuType, Node, Resident, utilisation_of
from placement.solver.view import busier
from placement.types import CPU, Device, DeviceKey, Inventory, key_of
from profiler.roofline import LINK_TO_MEMORY

# Defaults without measured links: PCIe 4.0 x16 and 100 Gbit/s, never more than the fast links.
NODE_BYTES_PER_S, NETWORK_BYTES_PER_S = 25e9, 12.5e9


def type_name(device: Device) -> str:
    """The type's name. Devices of one type share a profile; all count as fast as the slowest of the type."""
    return device.model or device.kind


def clusters_of(
    inventory: Inventory, residents: Mapping[DeviceKey, Sequence[Resident]] | None = None
) -> tuple[Cluster, ...]:
    """One cluster for each type of GPU, then one for all CPU hosts. A deployment's ranks use one type.

    `residents` are the ranks on each device, for anti-affinity, and the load that is expected of them.
    `free_bytes` already counts them; a sampled `load` counts only their recent requests.
    """
    groups: dict[tuple[bool, str], list[Device]] = defaultdict(list)
    for device in inventory.devices:
        on_cpu = device.kind == CPU
        groups[on_cpu, "" if on_cpu else type_name(device)].append(device)
    return tuple(_cluster(devices, residents or {}) for _, devices in sorted(groups.items()))


def _cluster(devices: Sequence[Device], residents: Mapping[DeviceKey, Sequence[Resident]]) -> Cluster:
    types: dict[str, GpuType] = {}
    nodes: dict[str, list[Gpu]] = defaultdict(list)
    for device in sorted(devices, key=key_of):
        kind = type_name(device)
        types[kind] = _slower(types.get(kind), device)
        nodes[device.node].append(_gpu(device, kind, tuple(residents.get(key_of(device), ()))))
    links = assumed_links(types.values())
    own = {key_of(device) for device in devices}
    others: dict[str, list[Resident]] = defaultdict(list)
    for key in sorted(residents.keys() - own):
        others[key.node] += residents[key]
    made = tuple(Node(name, tuple(gpus), tuple(others[name])) for name, gpus in sorted(nodes.items()))
    return Cluster(made, tuple(types[name] for name in sorted(types)), links)


def assumed_links(types: Iterable[GpuType]) -> tuple[float, float, float]:
    """Bandwidths of links that were not measured (`Cluster`)."""
    fast = min(kind.memory_bytes_per_s for kind in types) * LINK_TO_MEMORY
    node = min(fast, NODE_BYTES_PER_S)
    return fast, node, min(node, NETWORK_BYTES_PER_S)


def by_type(cluster: Cluster, headroom: float, links_given: bool) -> tuple[Cluster, ...]:
    """As `clusters_of`, from a cluster of several types. `headroom`: the share of each device to leave free.
    Without `links_given` the links are the assumed ones."""
    every = [_named(kind) for kind in sorted(cluster.types, key=lambda kind: kind.name)]
    groups = [every] if any(kind.shared for kind in every) else [[kind] for kind in every]
    return tuple(_of_types(cluster, kinds, headroom, links_given) for kinds in groups)


def _named(kind: GpuType) -> GpuType:
    return replace(kind, kind=CPU if kind.shared else kind.kind or kind.name)


def _of_types(cluster: Cluster, kinds: Sequence[GpuType], headroom: float, links_given: bool) -> Cluster:
    names, nodes = {kind.name for kind in kinds}, list[Node]()
    for node in cluster.nodes:
        gpus = tuple(_usable(gpu, headroom) for gpu in node.gpus if gpu.type in names)
        others = [resident for gpu in node.gpus if gpu.type not in names for resident in gpu.residents]
        if gpus:
            nodes.append(Node(node.name, gpus, (*node.residents, *others)))
    links = cluster.link_bytes_per_s if links_given else assumed_links(kinds)
    return Cluster(tuple(nodes), tuple(kinds), links)


def _usable(gpu: Gpu, headroom: float) -> Gpu:
    return replace(gpu, free_bytes=max(0, gpu.free_bytes - int(headroom * gpu.total_bytes)))


def inventory_of(clusters: Iterable[Cluster]) -> Inventory:
    """The devices of clusters from `by_type`."""
    devices = []
    for cluster in clusters:
        types = {kind.name: kind for kind in cluster.types}
        devices += [_device(node.name, gpu, types[gpu.type]) for node in cluster.nodes for gpu in node.gpus]
    return Inventory(tuple(devices))


def _device(node: str, gpu: Gpu, kind: GpuType) -> Device:
    return Device(
        node,
        gpu.index,
        kind.kind,
        gpu.total_bytes,
        gpu.free_bytes,
        kind.rates(1),
        kind.name,
        load=gpu.load,
        nvlink_domain=gpu.nvlink_domain,
    )


def _slower(known: GpuType | None, device: Device) -> GpuType:
    rates = device.rates
    if known is None:
        shared = device.kind == CPU
        return GpuType(type_name(device), rates.memory_bytes_per_s, rates.flops_per_s, shared, device.kind)
    return replace(
        known,
        memory_bytes_per_s=min(known.memory_bytes_per_s, rates.memory_bytes_per_s),
        flops_per_s=min(known.flops_per_s, rates.flops_per_s),
    )


def _gpu(device: Device, kind: str, residents: tuple[Resident, ...]) -> Gpu:
    free = min(max(0, device.free_bytes), device.total_bytes)
    load = min(max(0.0, device.load, expected_load(residents)), 1.0)
    return Gpu(device.index, kind, device.total_bytes, free, load, device.nvlink_domain, residents)


def expected_load(residents: Iterable[Resident]) -> float:
    """The load of a device with these ranks, computed as if their deployments were placed on the idle
    device."""
    ranks: dict[str, list[Resident]] = defaultdict(list)
    for resident in residents:
        ranks[resident.deployment].append(resident)
    return reduce(busier, map(utilisation_of, ranks.values()), 0.0)
