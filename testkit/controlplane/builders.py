"""Records and states, as short as they can be written."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from controlplane import errors
from controlplane.controller.registration import Limits, read_model_files
from controlplane.state.records import (
    Deployment,
    Model,
    ModelProfile,
    NodeLedger,
    Operation,
    OperationKind,
    PathProfile,
    Phase,
    key_of,
)
from controlplane.state.repository import State, Versioned
from controlplane.state.worker_groups import GroupPhase, WorkerGroup
from placement.types import Intent, Placement, Plan
from profiler.types import Estimate

PLACED = Placement(Plan(1, (2,), "none", 64, 64, 1, 16), (), Estimate(1.0, 1.0, (1,), 100.0), "it fits")


def model(name: str, phase: Phase, base: str | None = None) -> Model:
    return Model(name, 1, phase, source=None if base else "/m", base=base, adapter="/a" if base else None)


def deployment(
    name: str, phase: Phase, base: str | None = None, placed: Placement | None = PLACED
) -> Deployment:
    """A deployment. A base's has one group, in the phase that matches; a variant's has none."""
    if base not in (None, name):
        return Deployment(name, 1, base or name, phase, Intent.MIN_COST, 16)
    group = GroupPhase.SERVING if phase is Phase.DEPLOYED else GroupPhase.STARTING
    groups = (WorkerGroup(0, group if placed else GroupPhase.PENDING, placed),)
    return Deployment(name, 1, name, phase, Intent.MIN_COST, 16, groups=groups)


def operation(kind: OperationKind, target: str, **changes: Any) -> Operation:
    return replace(Operation("op-1", kind, target, Phase.PENDING), **changes)


def state(*records: Any) -> State:
    def of(cls: Any) -> dict[str, Any]:
        return {key_of(r): Versioned(r, 1) for r in records if isinstance(r, cls)}

    main = of(Model), of(Deployment), of(Operation)
    return State(1, *main, profiles=of(ModelProfile), ledgers=of(NodeLedger), paths=of(PathProfile))


def holders(now: State) -> set[str]:
    """The holders of reservations."""
    return {r.holder for found in now.ledgers.values() for r in found.record.reservations}


def no_bundles(name: str) -> Path:
    raise errors.SourceUnreadable(f"no {name}")


def base(files: Path, folder: str = "base") -> Model:
    return Model("b", 1, Phase.PROFILING, source=str(files / folder))


def variant(files: Path, folder: str) -> Model:
    return Model("v", 2, Phase.PROFILING, base="b", adapter=f"file://{files / folder}")


def ready_base(files: Path, folder: str = "base") -> Model:
    return read_model_files(base(files, folder), None, Limits((files,), 16), no_bundles)
