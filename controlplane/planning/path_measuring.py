"""Whether the request path is to be measured now, and through which base's engines. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from controlplane.planning import retrying
from controlplane.planning.retrying import RetryLimits
from controlplane.state.records import Deployment, PathProfile, Phase
from controlplane.state.repository import State
from controlplane.state.worker_groups import GroupPhase

# Attempts never end: the obstacle may disappear, and estimates lack the measurement until then.
PAUSES = RetryLimits(first_pause_s=10.0, max_pause_s=1800.0)
QUIET_WAIT_S = 600.0  # from when an engine serves; after that, the cluster need not be quiet


def is_due(state: State, key: str, now_s: float, quiet: bool = True) -> bool:
    """Whether the path is to be measured now. No other measurement may run and no engine may start, because
    their work would be included.

    `quiet`: no requests are under way. A measurement waits for that, but only for QUIET_WAIT_S.
    """
    known = state.paths.get(key)
    if not key or (known and (known.record.path or not retrying.due(known.record.failed, now_s))):
        return False
    groups = [group for versioned in state.deployments.values() for group in versioned.record.groups]
    if any(group.phase is GroupPhase.STARTING for group in groups):
        return False
    if any(profile.record.phase is Phase.PROFILING for profile in state.profiles.values()):
        return False
    since_s = min((g.since_s for g in groups if g.phase is GroupPhase.SERVING), default=now_s)
    return quiet or now_s - since_s > QUIET_WAIT_S


def next_base(state: State, key: str, bases: Sequence[str]) -> str:
    """The base to measure; another one after each failure, because the failure may be that base's fault."""
    known = state.paths.get(key)
    return bases[(known.record.failed.failures if known else 0) % len(bases)]


def longest_prompt(deployment: Deployment) -> int:
    """Tokens of a prompt that each of a base's engines takes, with the same number to spare."""
    serving = [g.placement for g in deployment.groups if g.phase is GroupPhase.SERVING and g.placement]
    return min((placement.plan.max_model_len for placement in serving), default=0) // 2


def failed(key: str, known: PathProfile | None, reason: str, now_s: float) -> PathProfile:
    before = known or PathProfile(key)
    return replace(before, failed=retrying.counted(before.failed, reason, now_s, PAUSES, key))
