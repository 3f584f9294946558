"""Why a variant could not be loaded, as a rank reports it to the worker: a kind in addition to the text.
Pure.

Exceptions become messages in a rank's process and exceptions again in the worker's.
"""

from __future__ import annotations

from enum import StrEnum

from profiler.errors import CheckpointError


class Fault(StrEnum):
    FILES = "files"  # its files are missing or damaged: reading them again would not help
    VARIANT = "variant"  # its files are valid, but this engine cannot serve it
    ENGINE = "engine"  # anything else: another attempt may succeed


class LoadFailed(RuntimeError):
    """Loading failed for a reason other than the variant's files or the engine's configuration."""


def fault_of(error: Exception) -> Fault:
    """The kind of failure of a loader's exception."""
    if isinstance(error, CheckpointError):
        return Fault.FILES
    return Fault.VARIANT if isinstance(error, ValueError) else Fault.ENGINE


def exception_of(fault: str, text: str) -> Exception:
    """The exception that a worker raises: CheckpointError, ValueError or LoadFailed."""
    match fault:
        case Fault.FILES:
            return CheckpointError(text)
        case Fault.ENGINE:
            return LoadFailed(text)
        case _:
            return ValueError(text)
