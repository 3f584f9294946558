"""Why a variant could not be loaded, as it goes from a rank to the worker: a kind beside the text. Pure.

Exceptions become messages in a rank's process and exceptions again in the worker's.
"""

from __future__ import annotations

from enum import StrEnum

from profiler.errors import CheckpointError


class Fault(StrEnum):
    FILES = "files"  # its files are missing or damaged: to read them again would find the same
    VARIANT = "variant"  # its files are sound, but this engine cannot serve it
    ENGINE = "engine"  # anything else: another attempt may do


class LoadFailed(RuntimeError):
    """Loading failed for a reason that lies neither in the variant's files nor in what the engine is."""


def fault_of(error: Exception) -> Fault:
    """What kind of failure an exception of a loader is."""
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
