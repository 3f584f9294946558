"""Where variants are, as users see it: by name, tier, slot and rank."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from controlplane.management.schemas.common import View
from workers.tiers import Tier

if TYPE_CHECKING:
    from workers.messages import EngineResidency, VariantPlace

UNREAD = "not read yet; it is read when it is loaded, prefetched or requested"


class RankBytesView(View):
    rank: int
    hostBytes: int
    deviceBytes: int


class VariantResidencyView(View):
    """`tier` is device (ready to run), host (a copy away) or disk; `reason` says why it is not ready."""

    model: str
    tier: str
    slot: int | None
    ranks: list[RankBytesView]
    reason: str


class EngineResidencyView(View):
    """One replica. `limit` variants run at once, at most as many as `slots`; skips and preemptions are
    counted since it started."""

    node: str
    pid: int
    slots: int
    limit: int
    skips: int
    preemptions: int
    blockedRequests: int
    variants: list[VariantResidencyView]

    @classmethod
    def of(cls, seen: EngineResidency, names: Mapping[str, int]) -> EngineResidencyView:
        """`names` are the variants to show, with their uids; other variants of the engine are left out."""
        places = {place.uid: place for place in seen.variants}
        return cls(
            node=seen.node,
            pid=seen.pid,
            slots=seen.slots,
            limit=seen.limit,
            skips=seen.skips,
            preemptions=seen.preemptions,
            blockedRequests=seen.blocked,
            variants=[_view(name, places.get(uid)) for name, uid in sorted(names.items())],
        )


def _view(name: str, place: VariantPlace | None) -> VariantResidencyView:
    if place is None:
        return VariantResidencyView(model=name, tier=Tier.DISK, slot=None, ranks=[], reason=UNREAD)
    return VariantResidencyView(
        model=name,
        tier=place.tier,
        slot=place.slot,
        ranks=[
            RankBytesView(rank=r.rank, hostBytes=r.host_bytes, deviceBytes=r.device_bytes)
            for r in place.ranks
        ],
        reason=place.reason,
    )
