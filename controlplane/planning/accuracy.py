"""What a variant keeps of its fine-tune's accuracy, and what accuracy SLOs ask of its base then. Pure.

Accuracies are in percent of the uncompressed model's (MaverIQ, Table 1). The losses of a variant and of its
base are taken for independent ones: 98% of 97% is 95.06%.
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
    """The accuracies of a variant: those that its user gave, else the one that compressing measured."""
    if given or measured is None:
        return dict(given)
    return {UNCOMPRESSED: measured.accuracy}


def of_variant(model: Model) -> float | None:
    """What a variant keeps: what its user said of it uncompressed, else what was measured; None when neither
    is known."""
    known = [value for name, value in model.compression.items() if name in ALIASES]
    if known:
        return min(known)
    if model.delta is None:
        return WHOLE
    artifact = model.delta.artifact
    return artifact.quality.accuracy if artifact is not None and artifact.quality is not None else None


def base_limit(variant: Model, asked: float | None) -> float | None:
    """The least accuracy of the base with which its variant has the accuracy that is asked for.

    Errors: NoFeasiblePlan where the variant's own is less, or is not known.
    """
    if asked is None:
        return None
    accuracy = of_variant(variant)
    if accuracy is None:
        raise errors.NoFeasiblePlan(
            f"the accuracy of '{variant.name}' was not measured, and {asked:g}% are asked for; register it "
            "with an `evaluation` file or a `compressionTechnique`, or leave SLOs.accuracy out",
            details={"binding": infeasibility.name_of(Constraint.ACCURACY), "relaxations": []},
        )
    if accuracy < asked:
        raise infeasibility.refusal(_refused(variant.name, asked, accuracy))
    return min(WHOLE, asked * WHOLE / accuracy)


def require_base(base: Model, deployment: Deployment | None, least: float | None) -> None:
    """Errors: NoFeasiblePlan where engines that are placed already are less accurate than that, or where
    none is and no technique of the base is so accurate."""
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
    """A base's deployment, no engine of which is placed with less accuracy than that from now on."""
    slos = deployment.slos
    if least is None or (slos.accuracy is not None and slos.accuracy >= least):
        return deployment
    return replace(deployment, slos=replace(slos, accuracy=least))


def _refused(name: str, asked: float, offered: float) -> NotPlaced:
    relaxation: Relaxation = concessions.less_accurate(asked, offered)
    return NotPlaced(name, Constraint.ACCURACY, "", (relaxation,))
