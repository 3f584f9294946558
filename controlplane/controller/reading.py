"""Messages between the controller and the process that reads files for it, and that process's limits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field

from controlplane.controller.registration import Limits
from controlplane.state.records import Model

MIB = 1 << 20


@dataclass(frozen=True)
class ReadLimits:
    """Limits of one reading: memory beyond what the process has at the start, CPU time, elapsed time, open
    files. A variant's bytes are read completely. After its headers were found sound, each MiB of them gives
    the process more time."""

    memory_bytes: int = 1024 * MIB
    cpu_s: int = 60
    wall_s: float = 1800.0  # samples of every tensor of a large model, from a slow network disk
    files: int = 64
    cpu_s_per_mib: float = 0.02
    wall_s_per_mib: float = 0.2

    def cpu_s_for(self, count: int) -> float:
        """Additional CPU time for reading `count` bytes."""
        return self.cpu_s_per_mib * count / MIB

    def wall_s_for(self, count: int) -> float:
        return self.wall_s_per_mib * count / MIB


@dataclass(frozen=True)
class Request:
    """Arguments of `registration.read_model_files`; `bundled` is the folder of a bundled model, if any."""

    model: Model
    base: Model | None
    limits: Limits
    bundled: str = ""


@dataclass(frozen=True)
class Growing:
    """`more_bytes` more bytes are read from now on."""

    more_bytes: int
    kind: Literal["growing"] = "growing"


@dataclass(frozen=True)
class Read:
    """The model as it was read. `last`: the process ends now."""

    model: Model
    last: bool = False
    kind: Literal["read"] = "read"


@dataclass(frozen=True)
class Failed:
    """The body of the error."""

    body: dict[str, Any]
    last: bool = False
    kind: Literal["failed"] = "failed"


Line = Annotated[Growing | Read | Failed, Field(discriminator="kind")]
