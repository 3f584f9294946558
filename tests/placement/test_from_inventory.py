"""The way from nodes' reports to the solver's search."""

from __future__ import annotations

import pytest

from placement.solver.cluster import Resident
from placement.solver.from_inventory import clusters_of
from placement.types import CPU, Device, DeviceKey, Inventory
from profiler.types import DeviceRates

GIB = 1 << 30


def device(node: str, index: int, kind: str = "b300", **fields: object) -> Device:
    rates = fields.pop("rates", DeviceRates(8e12, 2e15))
    given = {"total_bytes": 100 * GIB, "free_bytes": 60 * GIB, "model": kind} | fields
    return Device(node, index, kind, rates=rates, **given)  # type: ignore[arg-type]


def test_gpus_come_before_cpus_and_apart_from_them() -> None:
    found = clusters_of(Inventory((device("a", 0, CPU), device("b", 1), device("a", 0))))
    gpus, cpus = found
    assert [(n.name, [g.index for g in n.gpus]) for n in gpus.nodes] == [("a", [0]), ("b", [1])]
    assert [kind.shared for kind in gpus.types] == [False]
    assert [(n.name, len(n.gpus)) for n in cpus.nodes] == [("a", 1)]
    assert [kind.shared for kind in cpus.types] == [True]


def test_each_type_of_gpu_is_searched_alone_and_all_hosts_together() -> None:
    """The ranks of a deployment run one engine: on GPUs of one type."""
    mixed = (device("a", 0, "l4"), device("a", 1, "b300"), device("b", 0, "l4"))
    cpus = (device("a", 0, CPU, model="xeon"), device("b", 0, CPU, model="epyc"))
    found = clusters_of(Inventory((*mixed, *cpus)))
    assert [[kind.name for kind in cluster.types] for cluster in found] == [
        ["b300"],
        ["l4"],
        ["epyc", "xeon"],
    ]
    assert [cluster.gpu_count for cluster in found] == [1, 2, 2]


def test_nothing_to_place_on_is_no_cluster() -> None:
    assert clusters_of(Inventory(())) == ()


def test_an_unknown_type_is_as_fast_as_its_slowest_measured_device() -> None:
    slow, fast = DeviceRates(7e12, 3e15), DeviceRates(8e12, 2e15)
    (cluster,) = clusters_of(Inventory((device("a", 0, rates=fast), device("a", 1, rates=slow))))
    (kind,) = cluster.types
    assert (kind.name, kind.memory_bytes_per_s, kind.flops_per_s) == ("b300", 7e12, 2e15)
    fast_link, node, network = cluster.link_bytes_per_s
    assert fast_link == pytest.approx(7e12 / 40)
    assert (node, network) == (25e9, 12.5e9)


def test_links_are_never_slower_than_those_they_are_behind() -> None:
    (cluster,) = clusters_of(Inventory((device("a", 0, CPU, rates=DeviceRates(1e10, 1e11)),)))
    assert cluster.link_bytes_per_s == (2.5e8, 2.5e8, 2.5e8)


def test_load_nvlink_domain_memory_and_residents_are_the_devices() -> None:
    mine, other = device("a", 0, load=0.5, nvlink_domain=3), device("a", 1, free_bytes=-5, load=7.0)
    held = Resident("m", 0, 4, GIB, "g")
    (cluster,) = clusters_of(Inventory((mine, other)), {DeviceKey("a", "b300", 0): [held]})
    first, second = cluster.nodes[0].gpus
    assert (first.load, first.nvlink_domain, first.free_bytes, first.residents) == (0.5, 3, 60 * GIB, (held,))
    assert (second.load, second.free_bytes, second.residents) == (1.0, 0, ())  # bad reports are bounded


def test_a_device_is_as_busy_as_its_residents_are_expected_to_keep_it_or_as_it_was_seen() -> None:
    """Each takes a share of the time that the others leave: 1 - (1 - 0.5) (1 - 0.8); stages of one add up."""
    one, other = Resident("a", 0, 4, GIB, utilisation=0.5), Resident("b", 0, 4, GIB, utilisation=0.8)
    shard, next_stage = Resident("a", 0, 4, GIB, utilisation=0.5), Resident("a", 4, 8, GIB, utilisation=0.2)
    for held, sampled, expected in (
        ([], 0.25, 0.25),
        ([one], 0.25, 0.5),
        ([one], 0.75, 0.75),
        ([one, other], 0.0, 0.9),
        ([one, shard], 0.0, 0.5),
        ([one, shard, next_stage], 0.0, 0.7),
    ):
        (cluster,) = clusters_of(
            Inventory((device("a", 0, load=sampled),)), {DeviceKey("a", "b300", 0): held}
        )
        assert cluster.nodes[0].gpus[0].load == pytest.approx(expected)
