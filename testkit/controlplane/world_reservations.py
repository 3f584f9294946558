"""The measurements in a `World`, and their memory in the ledger meanwhile."""

from __future__ import annotations

from collections.abc import Sequence

from controlplane.state.records import Phase, Reservation
from controlplane.state.repository import Change, Repository
from testkit.controlplane.builders import holders
from testkit.controlplane.world import World
from testkit.measured_cluster import MeasuredCluster


class Checked(Repository):
    def commit(self, changes: Sequence[Change]) -> int:
        revision = super().commit(changes)
        now = self.read()
        begun = {key for key, found in now.profiles.items() if found.record.phase is Phase.PROFILING}
        assert {f"measuring:{key}" for key in begun} == {h for h in holders(now) if ":" in h}
        return revision


def cluster(world: World) -> MeasuredCluster:
    assert isinstance(world.cluster, MeasuredCluster)
    return world.cluster


def reservations(world: World) -> list[Reservation]:
    return [r for found in world.repository.read().ledgers.values() for r in found.record.reservations]
