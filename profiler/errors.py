"""Errors in files that the profiler reads. The control plane maps these to its own errors.

CheckpointError   missing, truncated, corrupt or unsupported files     (controlplane: SourceUnreadable)
AdapterError      a sound adapter that does not fit its base or Ostinato (controlplane: AdapterMismatch)
MeasurementError  a file that does not hold measurements             (controlplane: SourceUnreadable)
PlanError         a plan or load that makes no sense for a model     (controlplane: InvalidRequest)
TaskError         a file that does not hold tasks                    (controlplane: InvalidRequest)
"""

from __future__ import annotations


class CheckpointError(ValueError):
    """A file is missing or unusable. The message says what was expected, what was found and what to do."""


class AdapterError(ValueError):
    """The adapter's files are sound but it cannot be served on this base. Same form of message."""


class MeasurementError(ValueError):
    """A file of measurements cannot be used. Same form of message."""


class TaskError(ValueError):
    """A file of tasks cannot be used. Same form of message."""


class PlanError(ValueError):
    """A plan or a load that cannot be estimated. Same form of message; `field` names the wrong field."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field
