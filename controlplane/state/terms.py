"""Phases and bounds, of which both records and clients speak. It imports nothing: clients start at once."""

from __future__ import annotations

from enum import StrEnum


class Phase(StrEnum):
    PENDING = "Pending"
    PROFILING = "Profiling"
    READY = "Ready"
    DEPLOYING = "Deploying"
    DEPLOYED = "Deployed"
    DELETING = "Deleting"
    DELETED = "Deleted"
    CANCELLED = "Cancelled"
    FAILED = "Failed"


FINAL_PHASES = frozenset({Phase.READY, Phase.DEPLOYED, Phase.DELETED, Phase.CANCELLED, Phase.FAILED})


class GroupPhase(StrEnum):
    PENDING = "Pending"  # to be placed, for the first time or anew
    STARTING = "Starting"
    SERVING = "Serving"
    DRAINING = "Draining"  # gets no new requests; stopped when it has none left


# Of requests under way per engine. Stored records may hold less; a division by nearly nothing has no result.
MIN_TARGET = 0.01
