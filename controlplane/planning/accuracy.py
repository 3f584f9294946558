"""The accuracy that a variant keeps of its fine-tune, and the base accuracy that SLOs then require. Pure.

Accuracies are in percent of the uncompressed model's (MaverIQ, Table 1). The losses of a variant and of its
base are assumed to be independent: 98% of 97% is 95.06%.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from controlplane import errors
from controlplane.planning import infeasibility
from controlplane.state.deltas import Quality
from controlplane.state.records import Deployment, Model
from controlplane.state.terms import GroupPhase
from placement.solver import concessions
from placement.solver.outcome import NotPlaced
from placement.types import Constraint, Relaxation
from profiler.quantization import ALIASES, UNCOMPRESSED, canonical

WHOLE = 100.0


def registered(given: Mapping[str, float], measured: Quality | None) -> dict[str, float]:
    """The accuracies of a variant: those given by its user, else the one measured during compression."""
    if given or measured is None:
        return dict(given)
    return {UNCOMPRESSED: measured.accuracy}


def of_variant(model: Model) -> float | None:
    """The accuracy of a variant: the user's value for the uncompressed variant, else the measured value; None
    if neither is known."""
    known = [value for name, value in model.compression.items() if name in ALIASES]
    if known:
        return min(known)
    if model.delta is None:
        return WHOLE
    artifact = model.delta.artifact
    return artifact.quality.accuracy if artifact is not None and artifact.quality is not None else None


def base_limit(variant: Model, asked: float | None) -> float | None:
    """The least accuracy of the base with which its variant has the requested accuracy.

    Errors: NoFeasiblePlan if the variant's own accuracy is lower, or unknown.
    """
    if asked is None:
        return None
    accuracy = of_variant(variant)
    if accuracy is None:
        raise errors.NoFeasiblePlan(
            f"SLOs.accuracy asks for {asked:g}%, but the accuracy of '{variant.name}' is unknown; register "
            "it with an `evaluation` file or a `compressionTechnique`, or leave SLOs.accuracy out",
            details={"binding": infeasibility.name_of(Constraint.ACCURACY), "relaxations": []},
        )
    if accuracy < asked:
        raise infeasibility.refusal(_refused(variant.name, asked, accuracy))
    return min(WHOLE, asked * WHOLE / accuracy)


def require_base(base: Model, deployment: Deployment | None, least: float | None) -> None:
    """Errors: NoFeasiblePlan if placed engines are less accurate than `least`, or if none is placed and no
    technique of the base is accurate enough."""
    if least is None or deployment is None:
        return
    known: dict[str, float] = {}
    for name, value in base.compression.items():
        known[canonical(name)] = min(value, known.get(canonical(name), WHOLE))
    going = [group for group in deployment.groups if group.phase is not GroupPhase.DRAINING]
    placed = [group.placement.plan.quantization for group in going if group.placement]
    offered = (
        min(known.get(canonical(quantization), WHOLE) for quantization in placed)
        if placed
        else max(known.values(), default=WHOLE)
    )
    if offered < least:
        raise infeasibility.refusal(_refused(base.name, least, offered))


def limited(deployment: Deployment, least: float | None) -> Deployment:
    """A base's deployment whose engines are placed with at least this accuracy from now on."""
    slos = deployment.slos
    if least is None or (slos.accuracy is not None and slos.accuracy >= least):
        return deployment
    return replace(deployment, slos=replace(slos, accuracy=least))


def _refused(name: str, asked: float, offered: float) -> NotPlaced:
    relaxation: Relaxation = concessions.less_accurate(asked, offered)
    return NotPlaced(name, Constraint.ACCURACY, "", (relaxation,))
