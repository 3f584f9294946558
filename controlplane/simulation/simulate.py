"""A whole scenario: every policy at every rate over all seeds, and how many groups suffice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from controlplane.simulation.experiment import Case, Experiment
from controlplane.simulation.forms import MAX_GROUPS, MAX_PLACES, ScenarioForm
from controlplane.simulation.intervals import over_seeds
from controlplane.simulation.sizing import smallest
from placement.solver.schema import ScenarioError


def simulate(form: ScenarioForm, folder: Path, for_slo: float | None = None) -> dict[str, Any]:
    """The document that `ostinato simulate --json` prints; deterministic for a scenario. Raises
    ScenarioError."""
    experiment = Experiment(form, folder)
    document: dict[str, Any] = {"name": form.name, "seeds": form.seeds, "horizonS": form.horizon_s}
    pairs = [(policy, rate) for rate in experiment.rates for policy in form.policies]
    if for_slo is None:
        return document | {"results": [_result(experiment, policy, rate) for policy, rate in pairs]}
    if len(form.cluster.groups) > 1:
        raise ScenarioError(
            "cluster.groups: --for-slo needs exactly one entry, whose count it searches; got several"
        )
    return document | {
        "forSlo": for_slo,
        "sizes": [_size(experiment, policy, rate, for_slo) for policy, rate in pairs],
    }


def over_all_seeds(
    experiment: Experiment, policy: str, rate: float | None, groups: tuple[int, ...]
) -> dict[str, Any]:
    cases = [Case(policy, rate, seed, groups) for seed in range(experiment.form.seeds)]
    measured: dict[str, Any] = over_seeds([experiment.run(case) for case in cases])
    return measured


def _result(experiment: Experiment, policy: str, rate: float | None) -> dict[str, Any]:
    measured = over_all_seeds(experiment, policy, rate, experiment.counts)
    return {"policy": policy, "ratePerS": rate, "groups": sum(experiment.counts)} | measured


def _size(experiment: Experiment, policy: str, rate: float | None, wanted: float) -> dict[str, Any]:
    found: dict[int, Any] = {}

    def attainment(groups: int) -> float:
        found[groups] = over_all_seeds(experiment, policy, rate, (groups,))["attainment"]["all"]
        if found[groups] is None:
            after = f"after warmUpS ({experiment.form.warm_up_s:g} s) and before horizonS"
            raise ScenarioError(
                f"warmUpS: no requests arrive {after}, so there is nothing to measure; shorten warmUpS, or "
                "raise traffic.repeat or the rate"
            )
        return float(found[groups]["mean"])

    most = min(MAX_GROUPS, MAX_PLACES // (1 + experiment.form.variant_count))
    sized = smallest(attainment, wanted, experiment.counts[0], most)
    fewer = None if sized.groups is None else found.get(sized.groups - 1)
    return {
        "policy": policy,
        "ratePerS": rate,
        "groups": sized.groups,
        "attainment": None if sized.groups is None else found[sized.groups],
        "withOneLess": fewer,
        "tried": {str(groups): sized.tried[groups] for groups in sorted(sized.tried)},
    }
