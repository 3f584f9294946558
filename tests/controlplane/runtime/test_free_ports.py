"""Ports of a local cluster."""

from __future__ import annotations

from controlplane.runtime.local import free_ports


def test_ports_asked_for_together_differ() -> None:
    found = free_ports(200)
    assert len(set(found)) == len(found) == 200
