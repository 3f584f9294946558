"""Ray Serve's status of the application of one worker group."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class EngineStatus(StrEnum):
    STARTING = "starting"
    RUNNING = "running"
    UNHEALTHY = "unhealthy"
    FAILED = "failed"
    DELETING = "deleting"


@dataclass(frozen=True)
class EngineView:
    status: EngineStatus
    message: str = ""
    replicas: int = 0
    installation: str = ""  # the installation that launched it; older engines do not report it
