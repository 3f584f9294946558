"""The decision to restart a local cluster: a function of the observed state. Pure.

Ray restarts the processes of its cluster that die: gateways, engines, agents, HAProxy and Serve's controller.
Nothing restarts the node itself, that is its control store (GCS) and its raylet. Without these the whole
cluster ends within a minute.
"""

from __future__ import annotations

from dataclasses import dataclass

from controlplane.planning.retrying import RetryLimits, pause_s

# The processes that a local head needs, by the kernel's names. The raylet ends with its agents.
HEAD = ("gcs_server", "raylet")
# Serve may take this time to start HAProxy again; on a busy machine it took 35 s. A HAProxy that hangs at its
# start is killed after 90 s (RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S).
API_GONE_S = 120.0
PAUSES = RetryLimits(first_pause_s=1.0, max_pause_s=60.0)
# If a cluster ran for this time, its start did not fail.
CALM_S = 600.0


@dataclass(frozen=True)
class Seen:
    """`gone`: processes of HEAD that ended. `refused_s`: seconds since the API's port refused connections;
    0: it accepts them. A slow answer is not a refusal."""

    gone: tuple[str, ...] = ()
    refused_s: float = 0.0


@dataclass(frozen=True)
class Starts:
    """The number of starts in a row that were each followed by a fault within CALM_S, and the time when
    the last start ended, whether it succeeded or not."""

    count: int = 0
    ended_s: float = 0.0


def fault(seen: Seen) -> str:
    """The reason why the cluster must be restarted; empty: none."""
    if seen.gone:
        return f"{' and '.join(seen.gone)} ended"
    if seen.refused_s > API_GONE_S:
        return f"no process has listened on the API's port for {seen.refused_s:.0f} s"
    return ""


def wait_s(starts: Starts, now_s: float) -> float:
    """The remaining pause before a start that is needed now: none at first, longer after each start in a
    row."""
    if not starts.count or now_s - starts.ended_s >= CALM_S:
        return 0.0
    return max(0.0, starts.ended_s + pause_s(starts.count, PAUSES) - now_s)


def counted(starts: Starts, began_s: float, ended_s: float) -> Starts:
    """The count after another start, with the times when it began and ended."""
    in_a_row = starts.count and began_s - starts.ended_s < CALM_S
    return Starts(starts.count + 1 if in_a_row else 1, ended_s)
