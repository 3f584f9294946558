"""Tables of the variants' residency."""

from __future__ import annotations

from controlplane.cli.output import print_table, print_text, size
from controlplane.management.schemas.models import DeploymentView
from controlplane.management.schemas.residency import EngineResidencyView, VariantResidencyView
from workers.tiers import Tier

COLUMNS = ("VARIANT", "TIER", "SLOT", "ON DEVICE", "IN HOST MEMORY", "REASON")


def print_residency(deployment: DeploymentView) -> None:
    """Print a line and a table for each replica of the engine."""
    if deployment.residency is None:
        if deployment.residencyReason:
            print_text(f"\nThe places of its variants are unknown: {deployment.residencyReason}")
        return
    for engine in deployment.residency:
        print_text(f"\n{_engine(engine)}")
        print_table(
            COLUMNS, [_row(v) for v in engine.variants], empty="no variants are deployed on this engine"
        )


def _engine(e: EngineResidencyView) -> str:
    return (
        f"Engine on {e.node} (process {e.pid}): {e.slots} slots, up to {e.limit} variants at once; "
        f"{e.blockedRequests} requests blocked, {e.skips} overtook others, {e.preemptions} preempted"
    )


def _row(v: VariantResidencyView) -> tuple[str, ...]:
    device = {r.rank: r.deviceBytes for r in v.ranks}
    host = {r.rank: r.hostBytes for r in v.ranks}
    return (
        v.model,
        v.tier,
        "-" if v.slot is None else str(v.slot),
        _by_rank(device),
        _by_rank(host),
        v.reason,
    )


def _by_rank(held: dict[int, int]) -> str:
    """`1.2 MiB` for the only rank; for several ranks, each by its number."""
    if not any(held.values()):
        return "-"
    if len(held) == 1:
        return size(held[0]) if 0 in held else ", ".join(f"rank {r}: {size(n)}" for r, n in held.items())
    return ", ".join(f"rank {rank}: {size(n) if n else '-'}" for rank, n in sorted(held.items()))


def where(deployment: DeploymentView) -> str:
    """The tier that a variant reaches in every replica, in words."""
    tiers = {v.tier for engine in deployment.residency or () for v in engine.variants}
    if not tiers:
        return f"read; its present place is unknown ({deployment.residencyReason})"
    if Tier.DISK in tiers:
        return "read, but already evicted from host memory by other variants (raise --host-gib)"
    return "in host memory" if Tier.HOST in tiers else "on the device"
