"""Why something was not placed, in the names and units of a request: as a sentence and as data. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from controlplane import errors
from controlplane.state.records import AutoRelax
from placement.solver.numbers import rounded
from placement.solver.outcome import NotPlaced
from placement.types import Constraint, Inventory, Relaxation, Unusable
from profiler.figures import figure
from profiler.plans import no_quantization_reason
from profiler.types import ModelSpec


class _Target(NamedTuple):
    """A constraint as a request names it, and the factor from the solver's unit to the request's."""

    name: str
    factor: float


_SLOS = {
    Constraint.LATENCY: _Target("SLOs.e2e_ms", 1000.0),
    Constraint.TTFT: _Target("SLOs.ttft_ms", 1000.0),
    Constraint.TPOT: _Target("SLOs.tpot_ms", 1000.0),
    Constraint.COST: _Target("SLOs.cost", 1.0),
}
# Constraints about times, which come from a profile.
TIMED = frozenset({*_SLOS, Constraint.RATE})
# Constraints whose values depend on how long answers are.
OF_WHOLE_ANSWERS = frozenset({Constraint.LATENCY, Constraint.COST, Constraint.RATE})
_NAMES = {
    Constraint.ACCURACY: "SLOs.accuracy",
    Constraint.RATE: "load.ratePerS",
    Constraint.CONTEXT: "load",
}


def refusal(
    outcome: NotPlaced,
    auto_relax: AutoRelax | None = None,
    unusable: Sequence[Unusable] = (),
    busy: str = "",
    assumed: str = "",
) -> errors.NoFeasiblePlan:
    """The error of a refusal. `details` has the binding constraint, and the relaxations: each one suffices,
    or all `together`.

    Nodes that were left out are named, since they may have room. `busy` says that times were measured while
    other work used the device; it is added if a time is the binding constraint. `assumed` says which length
    of answers was assumed; it is added if a limit depends on that.
    """
    relaxations = [as_data(relaxation) for relaxation in outcome.relaxations]
    doubt = f"; {busy}" if busy and outcome.binding in TIMED else ""
    limits = {outcome.binding, *(r.constraint for r in outcome.relaxations if outcome.together)}
    lengths = f"; {assumed}" if assumed and limits & OF_WHOLE_ANSWERS else ""
    left_out = f"; excluded devices: {_reasons(unusable)}" if unusable else ""
    return errors.NoFeasiblePlan(
        f"{_sentence(outcome, relaxations)}{_not_relaxed(outcome, auto_relax)}{lengths}{left_out}{doubt}",
        details=_details(name_of(outcome.binding), relaxations, outcome.together, unusable),
    )


def no_device(inventory: Inventory) -> errors.NoFeasiblePlan:
    why = f" ({_reasons(inventory.unusable)})" if inventory.unusable else ""
    return errors.NoFeasiblePlan(
        f"the cluster has no usable device{why}; add a device",
        details=_details(str(Constraint.MEMORY), unusable=inventory.unusable),
    )


def no_technique(compression: Mapping[str, float], served: ModelSpec, gpu: str = "") -> errors.NoFeasiblePlan:
    """The error for a model whose registered compression techniques all cannot be served on such a GPU."""
    return errors.NoFeasiblePlan(
        no_quantization_reason(compression, served, gpu), details=_details("compressionTechnique")
    )


def _details(
    binding: str,
    relaxations: Sequence[Mapping[str, Any]] = (),
    together: bool = False,
    unusable: Sequence[Unusable] = (),
) -> dict[str, Any]:
    details = {"binding": binding, "relaxations": list(relaxations), "together": together}
    return {**details, "unusable": [{"node": u.node, "reason": u.reason} for u in unusable]}


def _reasons(unusable: Sequence[Unusable]) -> str:
    return "; ".join(node.reason for node in unusable)


def name_of(constraint: Constraint) -> str:
    return _SLOS[constraint].name if constraint in _SLOS else _NAMES.get(constraint, constraint.value)


def as_data(relaxation: Relaxation) -> dict[str, Any]:
    name = name_of(relaxation.constraint)
    requested, offered, text = relaxation.asked, relaxation.offered, relaxation.text
    if relaxation.constraint in _SLOS:
        factor = _SLOS[relaxation.constraint].factor
        requested, offered = requested * factor, rounded(offered * factor, up=True)
        text = (
            f"raise {name} from {figure(requested, 4)} to {offered:.10g} ({figure(relaxation.factor)} times)"
        )
    return {
        "constraint": name,
        "asked": requested,
        "offered": offered,
        "factor": relaxation.factor,
        "text": text,
    }


def _sentence(outcome: NotPlaced, relaxations: list[dict[str, Any]]) -> str:
    texts = [relaxation["text"] for relaxation in relaxations]
    if outcome.together:
        return f"no plan meets all limits together; possible: {' and '.join(texts)}"
    what = outcome.reason
    if outcome.binding is not Constraint.MEMORY:
        what = f"no plan meets the limits, because of {name_of(outcome.binding)}"
    return f"{what}; possible: {'; or '.join(texts)}" if texts else what


def _not_relaxed(outcome: NotPlaced, auto_relax: AutoRelax | None) -> str:
    if auto_relax is None or not auto_relax.allowed or not outcome.relaxations:
        return ""
    limit = auto_relax.max_factor
    return " (not applied" + (f": more than the allowed {limit:g} times)" if limit else " automatically)")
