"""When a local cluster is started again: a function of what is seen of it. Pure.

Ray starts again what dies in its cluster: gateways, engines, agents, HAProxy and Serve's controller. Nothing
does that for the node itself: its control store (GCS) and its raylet, without which all of it ends within a
minute.
"""

from __future__ import annotations

from dataclasses import dataclass

from controlplane.planning.retrying import RetryLimits, pause_s

# What a local head needs, as the kernel calls them. The raylet ends with its agents.
HEAD = ("gcs_server", "raylet")
# So long Serve may take to start HAProxy again; on a busy machine it took 35 s. One that hangs as it starts
# is killed after 90 s (RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S).
API_GONE_S = 120.0
PAUSES = RetryLimits(first_pause_s=1.0, max_pause_s=60.0)
# A cluster that ran for so long is no failed start.
CALM_S = 600.0


@dataclass(frozen=True)
class Seen:
    """`gone`: processes of HEAD that ended. `refused_s`: since when nobody listens where the API is; 0:
    somebody does. A slow answer is no refusal."""

    gone: tuple[str, ...] = ()
    refused_s: float = 0.0


@dataclass(frozen=True)
class Starts:
    """Starts in a row, each of which was followed by a fault before CALM_S were over; and when the last one
    ended, well or not."""

    count: int = 0
    ended_s: float = 0.0


def fault(seen: Seen) -> str:
    """Why the cluster must be started again; empty: it need not."""
    if seen.gone:
        return f"{' and '.join(seen.gone)} ended"
    if seen.refused_s > API_GONE_S:
        return f"nobody has listened for the API for {seen.refused_s:.0f} s"
    return ""


def wait_s(starts: Starts, now_s: float) -> float:
    """How long a start that is needed now must still wait: none at first, longer after each in a row."""
    if not starts.count or now_s - starts.ended_s >= CALM_S:
        return 0.0
    return max(0.0, starts.ended_s + pause_s(starts.count, PAUSES) - now_s)


def counted(starts: Starts, began_s: float, ended_s: float) -> Starts:
    """After another one, which began and ended then."""
    in_a_row = starts.count and began_s - starts.ended_s < CALM_S
    return Starts(starts.count + 1 if in_a_row else 1, ended_s)
