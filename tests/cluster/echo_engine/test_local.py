"""A local cluster keeps to itself: no port of it can be reached from elsewhere, no second one is started."""

from __future__ import annotations

import ipaddress

import psutil
import pytest
from clusters import Cluster

from controlplane import errors
from controlplane.runtime import local
from controlplane.settings import Settings

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def _listening(process: psutil.Process) -> set[str]:
    try:
        found = process.net_connections(kind="tcp")
    except psutil.NoSuchProcess:
        return set()
    return {c.laddr.ip for c in found if c.status == psutil.CONN_LISTEN}


def _is_loopback(address: str) -> bool:
    ip = ipaddress.ip_address(address)
    mapped = getattr(ip, "ipv4_mapped", None)
    return (mapped or ip).is_loopback


def test_every_port_is_on_loopback(echo_cluster: Cluster) -> None:
    addresses = {a for p in echo_cluster.processes() for a in _listening(p)}
    assert addresses, "nothing listens: the test looks at the wrong processes"
    assert {a for a in addresses if not _is_loopback(a)} == set()


def test_up_again_finds_the_running_cluster(echo_cluster: Cluster) -> None:
    said: list[str] = []
    assert local.up(echo_cluster.settings, said.append) == echo_cluster.local
    assert said == [f"already running at {echo_cluster.url}"]


def test_a_port_in_use_is_refused_with_a_way_out(echo_cluster: Cluster, tmp_path: object) -> None:
    settings = Settings.model_validate({**echo_cluster.settings.model_dump(), "home": tmp_path})
    with pytest.raises(errors.Unavailable, match="--port"):
        local.up(settings, lambda message: None)
