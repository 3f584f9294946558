"""Whether the way of requests is to be measured now, and through which base's engines. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from controlplane.state.records import Deployment, PathProfile, Phase
from controlplane.state.repository import State
from controlplane.state.worker_groups import GroupPhase

MAX_ATTEMPTS = 3


def is_due(state: State, key: str) -> bool:
    """Whether it is to be measured now: nothing else is, and no engine starts, whose work would be in it."""
    known = state.paths.get(key)
    if not key or (known and (known.record.path or known.record.attempts >= MAX_ATTEMPTS)):
        return False
    groups = [group for versioned in state.deployments.values() for group in versioned.record.groups]
    starting = any(group.phase is GroupPhase.STARTING for group in groups)
    return not starting and not any(p.record.phase is Phase.PROFILING for p in state.profiles.values())


def next_host(state: State, key: str, hosts: Sequence[str]) -> str:
    """Another one after each failure: it may be that base's."""
    known = state.paths.get(key)
    return hosts[(known.record.attempts if known else 0) % len(hosts)]


def longest_prompt(deployment: Deployment) -> int:
    """Tokens that each of a base's engines takes, with as many to spare."""
    serving = [g.placement for g in deployment.groups if g.phase is GroupPhase.SERVING and g.placement]
    return min((placement.plan.max_model_len for placement in serving), default=0) // 2


def failed(key: str, known: PathProfile | None, reason: str) -> PathProfile:
    before = known or PathProfile(key)
    return replace(before, attempts=before.attempts + 1, reason=reason)
