"""Phases and bounds that both records and clients use. It imports nothing, so that clients start at once."""

from __future__ import annotations

from enum import StrEnum

# Assumed lengths of requests, for estimates and deployments, if no others are given. An answer without a
# limit may fill the context; few do. A deployment's own limit counts if it is lower.
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
    PENDING = "Pending"  # to be placed, for the first time or again
    STARTING = "Starting"
    SERVING = "Serving"
    DRAINING = "Draining"  # gets no new requests; is stopped when none are left


class Priority(StrEnum):
    """The priority of a request. Among a tenant's requests, higher priorities go first. Lowest first here."""

    LOW = "low"
    NORMAL = "normal"
    HIGH = "high"

    level: int  # 0 is the lowest


for _level, _priority in enumerate(Priority):
    _priority.level = _level


class Role(StrEnum):
    """What a key allows: requests to models; also managing its tenant's models; everything."""

    INFERENCE = "inference"
    DEPLOYER = "deployer"
    ADMIN = "admin"


# Names of tenants. They contain no space, because keys of records join them with something else.
TENANT_NAME = r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}"


class LatePolicy(StrEnum):
    """The policy for a late request: it is answered anyway, or it ends with an error."""

    FINISH = "finish"
    DROP = "drop"


# The longest time that a request or a deployment may name: a day.
MAX_TARGET_MS = 86_400_000.0

# The least target of requests under way per engine. Stored records may have less; dividing by almost 0 would
# have no useful result.
MIN_TARGET = 0.01
