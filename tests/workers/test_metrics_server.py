"""Ports of a process's metrics: known ones, each taken once, named as others reach them."""

from __future__ import annotations

import random
import re
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest
from prometheus_client import Counter
from prometheus_client.parser import text_string_to_metric_families

from controlplane.settings import Settings
from workers.addresses import Ports, reached_at
from workers.server.metrics_server import serve_metrics

LOOPBACK = "127.0.0.1"
SEEN = Counter("ostinato_tests_of_metrics", "Made by a test.")


@pytest.fixture
def held() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def three_ports() -> Ports:
    """Adjacent ones that are free now, of those that no process is given without asking for them."""
    lowest_given = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    while True:
        first = random.SystemRandom().randrange(lowest_given // 2, lowest_given - 3)
        with ExitStack() as stack:
            try:
                for port in range(first, first + 3):
                    stack.enter_context(socket.create_server((LOOPBACK, port)))
            except OSError:
                continue
        return Ports(first, first + 2)


def samples(address: str) -> dict[str, float]:
    text = httpx.get(f"http://{address}/metrics", timeout=30, trust_env=False).text
    return {s.name: s.value for family in text_string_to_metric_families(text) for s in family.samples}


def test_each_takes_the_first_free_port_until_none_is_left(held: ExitStack) -> None:
    """Asked for at once, by as many as there are ports; one that is taken already is passed over."""
    ports = three_ports()
    held.enter_context(socket.create_server((LOOPBACK, ports.first + 1)))
    found: list[str] = []
    asking = [threading.Thread(target=lambda: found.append(serve_metrics(LOOPBACK, ports))) for _ in range(2)]
    for thread in asking:
        thread.start()
    for thread in asking:
        thread.join()
    assert sorted(found) == [f"{LOOPBACK}:{ports.first}", f"{LOOPBACK}:{ports.last}"]
    SEEN.inc()
    assert all(samples(address)["ostinato_tests_of_metrics_total"] >= 1 for address in found)
    expected = f"{LOOPBACK}.*{ports.first}-{ports.last} are all in use.*OSTINATO_METRICS_PORTS"
    with pytest.raises(OSError, match=expected):
        serve_metrics(LOOPBACK, ports)


def test_a_port_that_is_taken_on_every_interface_is_skipped(held: ExitStack) -> None:
    ports = three_ports()
    held.enter_context(socket.create_server(("0.0.0.0", ports.first)))
    assert serve_metrics(LOOPBACK, ports) == f"{LOOPBACK}:{ports.first + 1}"


def test_a_host_that_is_not_here_is_no_matter_of_ports() -> None:
    with pytest.raises(OSError, match="Cannot assign requested address"):
        serve_metrics("192.0.2.1", Ports(9464, 9465))


def test_any_port_is_taken_without_a_range() -> None:
    assert samples(serve_metrics(LOOPBACK))


def test_a_server_on_all_interfaces_is_named_by_the_node_s_address() -> None:
    address = serve_metrics("0.0.0.0", three_ports(), "198.51.100.7")
    assert re.fullmatch(r"198\.51\.100\.7:\d+", address)
    assert samples(f"{LOOPBACK}:{address.rpartition(':')[2]}")


def test_a_node_with_an_address_of_ipv6() -> None:
    assert reached_at("::", 9464, "2001:db8::1") == "[2001:db8::1]:9464"
    if socket.has_ipv6:
        address = serve_metrics("::1", Ports(), "2001:db8::1")
        assert address.startswith("[::1]:")
        assert samples(address)


@pytest.mark.parametrize(
    ("text", "expected"),
    [("9464-9527", (9464, 9527)), (" 9464 - 9470 ", (9464, 9470)), ("80", (80, 80)), ("", (0, 0))],
)
def test_ports_are_read(text: str, expected: tuple[int, int]) -> None:
    found = Settings(metrics_ports=text).metrics_port_range
    assert (found.first, found.last) == expected


@pytest.mark.parametrize(
    "text", ["x", "9527-9464", "0-5", "1-65536", "9464-", "-9464", "9464-9465-9466", "1,2"]
)
def test_invalid_ports_are_refused_with_the_expected_form(text: str) -> None:
    with pytest.raises(ValueError, match="write them like 9464-9527"):
        Settings(metrics_ports=text)
