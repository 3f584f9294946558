"""Phases and bounds, of which both records and clients speak. It imports nothing: clients start at once."""

from __future__ import annotations

from enum import StrEnum

# What estimates and deployments assume of requests where nobody says more. An answer without a limit may fill
# the context; few do. A deployment's own limit counts where it is lower.
EXPECTED_INPUT_TOKENS = 128
EXPECTED_OUTPUT_TOKENS = 256


class Phase(StrEnum):
    PENDING = "Pending"
    PROFILING = "Profiling"
    COMPRESSING = "Compressing"
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


class Priority(StrEnum):
    """Of a request: of one tenant's, those of a higher priority go first. Ordered from the lowest."""

    LOW = "low"
    NORMAL = "normal"
    HIGH = "high"

    @property
    def level(self) -> int:
        return _LEVELS[self]


_LEVELS = {priority: level for level, priority in enumerate(Priority)}


class Role(StrEnum):
    """What a key may do: ask models; manage those of its tenant too; everything."""

    INFERENCE = "inference"
    DEPLOYER = "deployer"
    ADMIN = "admin"


# Of tenants. No space is in it: keys of records are made of it and of something else.
TENANT_NAME = r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}"


class LatePolicy(StrEnum):
    """What becomes of a request that is late: it is answered all the same, or it ends with an error."""

    FINISH = "finish"
    DROP = "drop"


# Of times that a request or a deployment names: a day.
MAX_TARGET_MS = 86_400_000.0

# Of requests under way per engine. Stored records may hold less; a division by nearly nothing has no result.
MIN_TARGET = 0.01
