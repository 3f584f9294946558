"""What-if: where deployments would go on a cluster that a file describes. Pure.

A model with a config is decided exactly as when it is deployed there (`placement_decision`), with the
installation's settings and without a profile. A model by figures has no sizes to choose: the search alone
decides (`placement.solver.decide`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from controlplane import errors
from controlplane.planning.placement_decision import decide_on
from controlplane.planning.placement_question import POLICY, Wanted
from controlplane.settings import Settings
from controlplane.state.records import Deployment, ExpectedLoad, Model, Phase, PlanConstraints
from placement.solver.cluster import Cluster
from placement.solver.decide import decide
from placement.solver.from_inventory import by_type, inventory_of
from placement.solver.outcome import NotPlaced, Outcome
from placement.solver.policies.base import Policy
from placement.solver.request import Request
from placement.solver.schema import (
    GIB,
    MIB,
    DeploymentForm,
    ScenarioForm,
    VariantsForm,
    names_of,
    scenario_of,
)
from placement.solver.whatif import WhatIf, in_order
from placement.types import Constraint, CostMeasure, EngineSizes
from profiler.types import ModelSpec
from profiler.variants.types import ModuleFacts, VariantKind, VariantSpec


def what_if(form: ScenarioForm, folder: Path, settings: Settings, policy: Policy = POLICY) -> WhatIf:
    """The outcomes of a file's deployments, each on what earlier ones left. Paths in the file are relative to
    `folder`. Raises ScenarioError."""
    cluster, requests = scenario_of(form, folder)
    forms = {name: deployment for deployment in form.deployments for name in names_of(deployment)}
    links_given = "links" in form.cluster.model_fields_set

    def outcome(now: Cluster, request: Request) -> Outcome:
        if request.model.spec is None:
            return decide(now, request, policy)
        return as_deployed(now, request, forms[request.name], settings, policy, links_given)

    return in_order(cluster, requests, policy.name, outcome)


def as_deployed(
    cluster: Cluster,
    request: Request,
    form: DeploymentForm,
    settings: Settings,
    policy: Policy = POLICY,
    links_given: bool = False,
) -> Outcome:
    """The outcome of deploying a model with a config. Without `links_given` links are as fast as assumed of
    real clusters."""
    given = form.model_fields_set
    headroom = form.headroom if "headroom" in given else settings.headroom
    measure: CostMeasure = form.cost if "cost" in given else settings.cost_measure
    clusters = by_type(cluster, headroom, links_given)
    wanted = Wanted(
        Model(
            request.name,
            1,
            Phase.READY,
            compression={c.name: c.accuracy for c in request.model.compressions},
            spec=request.model.spec,
        ),
        _deployment(request, form),
        inventory_of(clusters),
        settings.model_copy(update={"cost_measure": measure}),
        tuple(_variants(form.variants, request)),
        policy=policy,
    )
    try:
        return decide_on(wanted, clusters)
    except errors.NoFeasiblePlan as refusal:
        return NotPlaced(request.name, _binding(refusal), refusal.message)


def _binding(refusal: errors.NoFeasiblePlan) -> Constraint:
    named = refusal.details["binding"]
    return Constraint.CONTEXT if named == "load" else Constraint(named)


def _deployment(request: Request, form: DeploymentForm) -> Deployment:
    """The request as a deployment; what the file leaves out is left out."""
    given = form.model_fields_set
    return Deployment(
        request.name,
        1,
        request.name,
        Phase.PENDING,
        request.intent,
        None,
        request.slos,
        load=ExpectedLoad(
            request.rate_per_s,
            form.input_tokens if "input_tokens" in given else None,
            form.output_tokens if "output_tokens" in given else None,
        ),
        constraints=PlanConstraints(
            form.tp or (tuple(range(1, form.max_tp + 1)) if "max_tp" in given else ()),
            form.pp or (tuple(range(1, form.max_pp + 1)) if "max_pp" in given else ()),
            group=request.group,
            scope=request.scope,
        ),
        engine=EngineSizes(
            context_tokens=form.context,
            requests_at_once=form.concurrency if "concurrency" in given else None,
            variant_slots=form.slots,
            lora_rank=form.lora_rank,
            variant_host_bytes=None if form.host_gib is None else int(form.host_gib * GIB),
            merged_slot=form.merged_slot,
        ),
    )


def _variants(forms: Sequence[VariantsForm], request: Request) -> Iterator[Model]:
    spec = request.model.spec
    if spec is None:
        return
    for number, form in enumerate(forms):
        variant = variant_spec(spec, form.kind, form.rank or 0, form.mib or 0.0)
        make = partial(Model, phase=Phase.READY, base=request.name, variant_spec=variant)
        yield from (make(f"{request.name}-{number}-{count}", 1) for count in range(form.count))


def variant_spec(spec: ModelSpec, kind: VariantKind, rank: int, mib: float) -> VariantSpec:
    """A LoRA adapter of this rank on all linear layers, or another variant with this size."""
    if kind is not VariantKind.LORA:
        return VariantSpec(kind, round(mib * MIB), {})
    sizes = {name: spec.dtype_bytes * rank * sum(shape) for name, shape in spec.linear_shapes.items()}
    modules = {name: ModuleFacts(size, rank) for name, size in sizes.items()}
    return VariantSpec(kind, spec.num_layers * sum(sizes.values()), modules)
