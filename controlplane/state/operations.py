"""The progress of an operation: pure functions from one operation to the next."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from controlplane import errors
from controlplane.state.records import Operation, OperationEvent, OperationKind, Phase
from controlplane.state.repository import State
from controlplane.state.transactions import Context


@dataclass(frozen=True)
class End:
    """The end of an operation."""

    phase: Phase
    message: str
    error: dict[str, Any] | None = None

    @classmethod
    def failed(cls, error: errors.OstinatoError) -> End:
        return cls(Phase.FAILED, error.message, error.body())


def advance(
    op: Operation, phase: Phase, message: str, now_s: float, progress: float | None = None
) -> Operation:
    """The operation with one more event; a repeated message adds no event."""
    repeated = op.events and op.events[-1].message == message and op.events[-1].phase == phase
    events = op.events if repeated else (*op.events[-63:], OperationEvent(now_s, phase, message))
    return dataclasses.replace(
        op,
        phase=phase,
        reason=message,
        progress=op.progress if progress is None else progress,
        updated_at_s=now_s,
        events=events,
    )


def begun(
    ctx: Context, kind: OperationKind, target: str, phase: Phase, message: str, tenant: str = ""
) -> Operation:
    """A new operation. `tenant`: the owner of the target."""
    return Operation(
        id=ctx.operation_id,
        kind=kind,
        target=target,
        phase=phase,
        reason=message,
        created_at_s=ctx.now_s,
        updated_at_s=ctx.now_s,
        events=(OperationEvent(ctx.now_s, phase, message),),
        tenant=tenant,
        asked_by=ctx.asked_by,
    )


def last_failure(state: State, kind: OperationKind, target: str) -> Operation | None:
    """The newest operation about `target`, if it failed."""
    about = (
        o.record for o in state.operations.values() if (o.record.kind, o.record.target) == (kind, target)
    )
    newest = max(about, key=lambda o: (o.created_at_s, o.id), default=None)
    return newest if newest is not None and newest.phase is Phase.FAILED else None


def open_operation(state: State, kind: OperationKind, target: str) -> Operation | None:
    """The open operation that a phase change of `target` belongs to; the oldest if there are several."""
    matching = [
        o.record
        for o in state.operations.values()
        if o.record.kind is kind and o.record.target == target and not o.record.done
    ]
    return min(matching, key=lambda o: (o.created_at_s, o.id), default=None)
