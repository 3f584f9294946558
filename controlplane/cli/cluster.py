"""cluster."""

from __future__ import annotations

from collections import defaultdict

import typer

from controlplane.cli.output import print_json, print_table, print_text, size
from controlplane.cli.session import Json, session
from controlplane.management.schemas.cluster import ClusterDeviceView, NodeView

COLUMNS = ("NODE", "DEVICE", "TOTAL", "USED", "RESERVED", "FREE", "LOAD", "ISLAND", "REPORT", "HELD BY")


def cluster(ctx: typer.Context, json: Json = False) -> None:
    """Show nodes and devices: used, reserved and free memory, load, and holders of the memory."""
    cli = session(ctx)
    with cli.client() as client:
        seen = client.cluster()
    if cli.json:
        print_json(seen)
        return
    rows = [_row(node, device) for node in seen.nodes for device in node.devices]
    print_table(
        COLUMNS, rows, empty="no devices are known yet" if seen.nodes else "no nodes have reported yet"
    )
    for node in seen.nodes:
        if not node.usable:
            print_text(f"Ostinato places no new engines on {node.name}: {node.reason}")
        for r in node.otherReservations:
            print_text(
                f"{node.name} no longer reports {r.device}, where {r.deployment} has reserved {size(r.bytes)}"
            )


def _row(node: NodeView, device: ClusterDeviceView) -> tuple[str, ...]:
    return (
        node.name,
        f"{device.kind}:{device.index}",
        size(device.totalBytes),
        size(device.usedBytes),
        size(device.reservedBytes),
        size(device.freeBytes),
        f"{device.load:.0%}",
        str(device.island),
        f"{node.reportAgeS:.1f} s ago",
        _holders(device),
    )


def _holders(device: ClusterDeviceView) -> str:
    """The bytes of each holder: reserved and, after a slash, in use."""
    promised: dict[str, int] = defaultdict(int)
    for r in device.reservations:
        promised[r.deployment] += r.bytes
    taken = {use.deployment: use.bytes for use in device.uses if use.deployment}
    return ", ".join(
        f"{name} {size(promised.get(name, 0))} / {size(taken.get(name, 0))}"
        for name in sorted({*promised, *taken})
    )
