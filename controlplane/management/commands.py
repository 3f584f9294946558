"""The changes of each accepted request: pure functions from the state to the records to write.

Each function returns an operation and the changes to commit with it. Every change names the version it
expects, so that exactly one of two concurrent requests for one name wins.
"""

from __future__ import annotations

import dataclasses

from controlplane import errors
from controlplane.management import requested
from controlplane.management.schemas.deploy import (
    NO_PARSER,
    DeployModelRequest,
    EngineForm,
    ReplicasChange,
    Targets,
)
from controlplane.management.schemas.models import RegisterModelRequest
from controlplane.planning import accuracy, autoscaling, lora_ranks, rebalancing
from controlplane.planning.engine_config import parsers_of
from controlplane.planning.engine_sizes import known_sizes
from controlplane.state import operations
from controlplane.state.operations import advance, open_operation
from controlplane.state.queries import find_model, find_operation
from controlplane.state.records import (
    Deployment,
    Model,
    ModelProfile,
    OperationKind,
    PathProfile,
    Phase,
)
from controlplane.state.repository import Change, Delete, Put, State, Versioned
from controlplane.state.transactions import Context, Outcome
from controlplane.state.worker_groups import WorkerGroup
from profiler.quantization import UNCOMPRESSED
from profiler.shards import tp_fits, tp_problem
from profiler.types import ModelSpec
from profiler.variants.types import VariantKind


def register_model(state: State, request: RegisterModelRequest, ctx: Context) -> Outcome:
    """Errors: AlreadyExists, ModelNotFound (the base), InvalidRequest (the base is a variant), NotReady."""
    if request.model in state.models:
        raise errors.AlreadyExists(
            f"a model named '{request.model}' is already registered; delete it first, or choose another name",
            param="model",
        )
    depends = [] if request.base is None else [_require_base(state, request.base)]
    # A tenant that may use a variant may use its base. So a variant of a tenant's base belongs to that
    # tenant, even when an admin registers it.
    tenant = (state.models[request.base].record.tenant if request.base else "") or ctx.tenant
    model = Model(
        name=request.model,
        uid=ctx.uids[0],
        phase=Phase.PENDING,
        source=request.source,
        base=request.base,
        adapter=request.adapter,
        compression=_accuracies(request),
        created_at_s=ctx.now_s,
        delta=requested.delta(request.compression),
        tenant=tenant,
        max_host_bytes=ctx.max_host_bytes,
    )
    operation = operations.begun(
        ctx, OperationKind.REGISTER, request.model, Phase.PENDING, "registration accepted", tenant
    )
    return Outcome(operation, [Put(model, 0), *depends, Put(operation, 0)])


def _accuracies(request: RegisterModelRequest) -> dict[str, float]:
    """The known accuracies. A delta that is made here has none yet, unless its user gives them."""
    if request.compressionTechnique is not None:
        return dict(request.compressionTechnique)
    return {UNCOMPRESSED: accuracy.WHOLE} if request.compression is None else {}


def _unchanged(versioned: Versioned[Model] | Versioned[Deployment]) -> Put:
    """Write a record back unchanged, so that the commit fails if another request deletes it meanwhile."""
    return Put(versioned.record, versioned.version)


def _require_base(state: State, name: str) -> Put:
    base = find_model(state, name, "base")
    if base.is_variant:
        raise errors.InvalidRequest(
            f"'{name}' is itself a variant of '{base.base}'; name a base model", param="base"
        )
    if base.phase is not Phase.READY:
        raise errors.NotReady(f"the base '{name}' is {base.phase}; wait until it is Ready", param="base")
    return _unchanged(state.models[name])


def deploy_model(state: State, request: DeployModelRequest, ctx: Context) -> Outcome:
    """Deploy a model; a variant's base is deployed with it, if it is not yet.

    Errors: ModelNotFound, NotReady, AlreadyExists, InvalidRequest (bounds that its base cannot keep, replicas
    that it does not have), NoFeasiblePlan (a variant, or its base, that is less accurate than requested).
    """
    model = find_model(state, request.model)
    if model.phase is not Phase.READY:
        raise errors.NotReady(f"'{model.name}' is {model.phase}; wait until it is Ready", param="model")
    present = state.deployments.get(request.model)
    if present is not None:
        raise errors.AlreadyExists(
            f"'{request.model}' is already deployed ({present.record.phase}); undeploy it first",
            param="model",
        )
    base_name = model.base or model.name
    _check_bounds(find_model(state, base_name), request)
    made = _deployment(model.name, base_name, request, ctx.uids[0], ctx.now_s)
    made = dataclasses.replace(made, targets=requested.targets(request.targets))
    changes: list[Change] = [Put(made, 0)]
    message = "deployment accepted"
    if base_name != model.name:
        changes.extend(_base_changes(state, model, base_name, request, ctx))
        joins = base_name in state.deployments
        message += f"; '{base_name}' will serve it" + ("" if joins else " and is deployed with it")
    changes.append(_unchanged(state.models[model.name]))
    operation = operations.begun(ctx, OperationKind.DEPLOY, model.name, Phase.PENDING, message, model.tenant)
    return Outcome(operation, [*changes, Put(operation, 0)])


def _base_changes(
    state: State, variant: Model, base_name: str, request: DeployModelRequest, ctx: Context
) -> list[Change]:
    """The changes of the base's deployment. It is always written, so that a concurrent deletion or
    placement must read it again."""
    present = state.deployments.get(base_name)
    least = accuracy.base_limit(variant, request.SLOs.accuracy)
    accuracy.require_base(find_model(state, base_name), present.record if present else None, least)
    if present is None:
        _check_rank(variant, base_name, request)
        begun = _deployment(base_name, base_name, request, ctx.uids[1], ctx.now_s)
        return [Put(dataclasses.replace(begun, slos=dataclasses.replace(begun.slos, accuracy=least)), 0)]
    if present.record.phase is Phase.DELETING:
        raise errors.NotReady(
            f"its base '{base_name}' is being undeployed; try again when it is gone", param="model"
        )
    if request.replicas is not None and requested.scaling(request) != present.record.scaling:
        raise errors.InvalidRequest(
            f"variants are served by the engines of '{base_name}', which is already deployed; leave "
            f"`replicas` out, or change the base's replicas with `ostinato tune {base_name}`",
            param="replicas",
        )
    _check_parsers(find_model(state, base_name), present.record, request)
    _check_sizes(present.record, request)
    base = _with_rank(find_model(state, base_name), present.record, variant, ctx)
    return [Put(accuracy.limited(base, least), present.version)]


def _check_parsers(base: Model, present: Deployment, request: DeployModelRequest) -> None:
    """Refuse parsers other than those of the base's running engines. Errors: InvalidRequest."""
    asked = {"toolCallParser": request.toolCallParser, "reasoningParser": request.reasoningParser}
    for (name, value), runs in zip(asked.items(), parsers_of(base, present), strict=True):
        if value is not None and requested.parser(value) != runs:
            raise errors.InvalidRequest(
                f"variants are served by the engines of '{base.name}', whose {name} is {runs or NO_PARSER}; "
                f"leave {name} out, or undeploy '{base.name}' and deploy it with {value}",
                param=name,
            )


def _check_rank(variant: Model, base_name: str, request: DeployModelRequest) -> None:
    """Refuse an adapter whose rank is larger than the request allows for new engines. Errors:
    InvalidRequest."""
    most = request.engine.loraRank if request.engine else None
    if lora_ranks.exceeds(variant, most):
        advice = "ask for a larger engine.loraRank (`--lora-rank`), or leave it out"
        raise errors.InvalidRequest(
            lora_ranks.mismatch(variant, base_name, most, advice), param="engine.loraRank"
        )


def _with_rank(base: Model, present: Deployment, variant: Model, ctx: Context) -> Deployment:
    """The base's deployment, with new engines if the present ones do not take the adapter's rank. A tenant
    may have new engines for its own bases only.

    Errors: InvalidRequest, NotReady.
    """
    if not lora_ranks.needs_new_engines(variant, present):
        return present
    if ctx.tenant not in ("", base.tenant):
        advice = (
            "an admin's key deploys it, or an admin starts engines that take it with "
            f"`ostinato tune {base.name} --place-anew`"
        )
        raise errors.InvalidRequest(
            lora_ranks.mismatch(variant, base.name, lora_ranks.largest_rank(variant, present), advice),
            param="model",
        )
    return lora_ranks.widened(variant, present)


def _check_sizes(present: Deployment, request: DeployModelRequest) -> None:
    """Refuse engine sizes other than those of the base's engines. Errors: InvalidRequest."""
    asked = requested.engine(request.engine)
    if asked.or_else(known_sizes(present)) != known_sizes(present):
        raise errors.InvalidRequest(
            f"variants are served by the engines of '{present.base}', which is already deployed; leave "
            f"`engine` out, or change the engines' sizes with `ostinato tune {present.base}`",
            param="engine",
        )


def _deployment(name: str, base_name: str, request: DeployModelRequest, uid: int, now_s: float) -> Deployment:
    scaling = requested.scaling(request)
    begun = max(1, scaling.min_groups) if name == base_name else 0
    return Deployment(
        model=name,
        uid=uid,
        base=base_name,
        phase=Phase.PENDING,
        intent=requested.intent(request),
        max_output_tokens=request.maxOutputLength,
        slos=requested.slos(request.SLOs),
        created_at_s=now_s,
        load=requested.load(request.load),
        constraints=requested.constraints(request),
        auto_relax=requested.auto_relax(request),
        scaling=scaling,
        groups=tuple(WorkerGroup(number) for number in range(begun)),
        tool_parser=requested.parser(request.toolCallParser) if name == base_name else None,
        reasoning_parser=requested.parser(request.reasoningParser) if name == base_name else None,
        engine=requested.engine(request.engine if name == base_name else None),
    )


def _check_bounds(base: Model, request: DeployModelRequest) -> None:
    """Refuse a request that no cluster could serve. Errors: InvalidRequest."""
    spec = base.spec
    if spec is None:
        return
    split, degrees = request.layersPerStage, request.tensorParallel
    if request.engine is not None:
        _check_engine(base, spec, request.engine)
    if split and sum(split) != spec.num_layers:
        raise errors.InvalidRequest(
            f"expected layersPerStage to add up to the {spec.num_layers} layers of '{base.name}', got "
            f"{'+'.join(map(str, split))} = {sum(split)}; correct layersPerStage",
            param="layersPerStage",
        )
    if degrees and not any(tp_fits(spec, tp) for tp in degrees):
        raise errors.InvalidRequest(
            f"'{base.name}' cannot run with a tensor parallelism of {' or '.join(map(str, degrees))} "
            f"({tp_problem(spec, degrees[0])}); choose another value for tensorParallel",
            param="tensorParallel",
        )


def _check_engine(base: Model, spec: ModelSpec, sizes: EngineForm) -> None:
    """Refuse sizes that this model's engines cannot have. Errors: InvalidRequest."""
    if sizes.contextTokens is not None and sizes.contextTokens > spec.max_position:
        raise errors.InvalidRequest(
            f"expected engine.contextTokens of at most {spec.max_position}, the positions of '{base.name}'; "
            f"got {sizes.contextTokens}; lower it, or leave it out",
            param="engine.contextTokens",
        )
    if not spec.adaptable and (sizes.variantSlots or sizes.loraRank):
        raise errors.InvalidRequest(
            f"variants of '{base.name}' are not supported, because of its architecture; leave "
            "engine.variantSlots and engine.loraRank out",
            param="engine.variantSlots",
        )


def profile_model(state: State, name: str, again: bool, ctx: Context) -> Outcome:
    """Measure the missing parts of a model's profile; `again`: everything, including the request path.

    A variant has the profile of its base. Errors: ModelNotFound, NotReady.
    """
    model = find_model(state, name)
    base = find_model(state, model.base) if model.base else model
    if base.phase is not Phase.READY:
        raise errors.NotReady(f"'{base.name}' is {base.phase}; wait until it is Ready", param="model")
    operation = operations.begun(
        ctx, OperationKind.PROFILE, base.name, Phase.PENDING, "profile accepted", base.tenant
    )
    changes: list[Change] = [_unchanged(state.models[base.name]), Put(operation, 0)]
    present = state.profiles.get(base.profile or "")
    if again and present is not None and present.record.settled:
        changes.append(Put(afresh(present.record, ctx.now_s), present.version))
    if again:
        changes += [Delete(PathProfile, key, found.version) for key, found in state.paths.items()]
    return Outcome(operation, changes)


def afresh(profile: ModelProfile, now_s: float) -> ModelProfile:
    """Delete a profile's measurements. Estimates are rough until the profile is measured again."""
    return dataclasses.replace(
        profile,
        phase=Phase.PENDING,
        measurements=(),
        points=0,
        seconds=0.0,
        attempts=0,
        rounds=profile.rounds + 1,
        memory_excess={},
        reason="waits to be measured again",
        updated_at_s=now_s,
    )


def undeploy_model(state: State, name: str, ctx: Context) -> Outcome:
    """Undeploy a model. Errors: NotDeployed; InUse while it serves variants."""
    present = state.deployments.get(name)
    if present is None:
        raise errors.NotDeployed(f"'{name}' is not deployed; `ostinato status` lists the deployments")
    users = [d.record.model for d in state.deployments.values() if d.record.base == name != d.record.model]
    if users:
        raise errors.InUse(
            f"'{name}' serves the variants {', '.join(sorted(users))}; undeploy them first",
            details={"used_by": sorted(users)},
        )
    model = state.models.get(name)
    operation = operations.begun(
        ctx,
        OperationKind.UNDEPLOY,
        name,
        Phase.PENDING,
        "undeployment accepted",
        model.record.tenant if model else "",
    )
    deleting = dataclasses.replace(present.record, phase=Phase.DELETING, reason="being undeployed")
    return Outcome(operation, [Put(deleting, present.version), Put(operation, 0)])


def limit_variants(deployment: Deployment, limit: int) -> Deployment:
    """The deployment of a base, with at most `limit` of its variants running at once (DeltaZip's N).

    Errors: InvalidRequest (a variant, or more than the slots), NotReady (slots are not known yet).
    """
    name, base_name = deployment.model, deployment.base
    if name != base_name:
        raise errors.InvalidRequest(
            f"'{name}' is a variant; set the number of variants at once for its base, '{base_name}'",
            param="maxActiveVariants",
        )
    if deployment.phase is Phase.DEPLOYED and deployment.placement is None:
        raise errors.NotReady(
            f"'{name}' has no engine now ({deployment.reason}), so its slots are unknown; try again when it "
            "has an engine"
        )
    if deployment.phase is Phase.DELETING or deployment.placement is None:
        raise errors.NotReady(f"'{name}' is {deployment.phase}; wait until it is Deployed")
    slots = deployment.placement.plan.max_variants
    if not slots:
        raise errors.InvalidRequest(
            f"variants of '{name}' are not supported, because of its architecture",
            param="maxActiveVariants",
        )
    if not 1 <= limit <= slots:
        raise errors.InvalidRequest(
            f"expected 1 to {slots} variants at once, because '{name}' has {slots} slots, got {limit}; "
            f"`ostinato tune {name} --slots N` gives it engines with more slots",
            param="maxActiveVariants",
        )
    return dataclasses.replace(deployment, max_active_variants=limit)


def change_replicas(deployment: Deployment, change: ReplicasChange) -> Deployment:
    """The deployment of a base, with other replicas. The bounds hold at once, if it was Deployed before.

    Errors: InvalidRequest (a variant, or `min` above `max`), NotReady (it is being undeployed).
    """
    name, base_name = deployment.model, deployment.base
    if name != base_name:
        raise errors.InvalidRequest(
            f"'{name}' is a variant; set the replicas of its base, '{base_name}'", param="replicas"
        )
    if deployment.phase is Phase.DELETING:
        raise errors.NotReady(f"'{name}' is being undeployed; deploy it again when it is gone")
    changed = dataclasses.replace(deployment, scaling=requested.changed_scaling(deployment.scaling, change))
    if not deployment.established:
        return changed
    return autoscaling.resized(changed, autoscaling.bounded(changed.scaling, autoscaling.active(changed)))


def change_targets(deployment: Deployment, change: Targets) -> Deployment:
    """The deployment of a base or a variant, with other targets for its requests.

    Errors: NotReady (it is being undeployed).
    """
    if deployment.phase is Phase.DELETING:
        raise errors.NotReady(f"'{deployment.model}' is being undeployed; deploy it again when it is gone")
    return dataclasses.replace(deployment, targets=requested.changed_targets(deployment.targets, change))


def place_anew(state: State, deployment: Deployment, sizes: EngineForm | None = None) -> Deployment:
    """The deployment of a base with new engines to be placed, which take over once they serve.

    Their sizes are chosen again, except sizes that the user requested before or requests now. Errors:
    InvalidRequest (a variant, sizes that its engines or variants cannot have), NotReady (it is being
    undeployed, or none of its engines serves).
    """
    name, base_name = deployment.model, deployment.base
    if name != base_name:
        raise errors.InvalidRequest(
            f"'{name}' is a variant; place the engines of its base, '{base_name}', again", param="placeAnew"
        )
    if deployment.phase is Phase.DELETING:
        raise errors.NotReady(f"'{name}' is being undeployed; deploy it again when it is gone")
    engine = deployment.engine
    if sizes is not None:
        base = find_model(state, name)
        if base.spec is not None:
            _check_engine(base, base.spec, sizes)
        engine = requested.changed_engine(engine, sizes)
    _check_deployed_ranks(state, name, engine.lora_rank)
    return rebalancing.renewed(dataclasses.replace(deployment, engine=engine, chosen=None))


def _check_deployed_ranks(state: State, base: str, most: int | None) -> None:
    """Refuse a LoRA rank below those of the deployed adapters. Errors: InvalidRequest."""
    specs = {v.name: v.variant_spec for v in state.variants_of(base) if v.name in state.deployments}
    wider = [
        f"'{name}' ({spec.max_rank})"
        for name, spec in specs.items()
        if most is not None and spec and spec.kind is VariantKind.LORA and spec.max_rank > most
    ]
    if wider:
        raise errors.InvalidRequest(
            f"the deployed {', '.join(wider)} need a larger LoRA rank than {most}; raise engine.loraRank, "
            "or undeploy these variants",
            param="engine.loraRank",
        )


def delete_model(state: State, name: str, ctx: Context) -> Outcome:
    """Delete a registration. A delta that was made here is deleted, too, also while it is being made.

    Errors: ModelNotFound; InUse while deployed, while a base of variants, or while being registered.
    """
    model = find_model(state, name)
    variants = sorted(variant.name for variant in state.variants_of(name))
    if name in state.deployments:
        raise errors.InUse(f"'{name}' is deployed; undeploy it first", details={"used_by": [name]})
    if variants:
        raise errors.InUse(
            f"'{name}' is the base of {', '.join(variants)}; delete these variants first",
            details={"used_by": variants},
        )
    if model.delta is not None:
        return _delete_made(state, model, ctx)
    if model.phase is not Phase.READY:
        raise errors.InUse(
            f"'{name}' is {model.phase}; wait until its operation ends, or cancel the operation"
        )
    operation = operations.begun(
        ctx, OperationKind.DELETE, name, Phase.DELETED, "registration deleted; the files stay", model.tenant
    )
    operation = dataclasses.replace(operation, progress=1.0)
    return Outcome(operation, [Delete(Model, name, state.models[name].version), Put(operation, 0)])


def _delete_made(state: State, model: Model, ctx: Context) -> Outcome:
    """Begin to delete a delta. The controller first ends its compression, and deletes its files."""
    name = model.name
    if model.phase is Phase.DELETING:
        raise errors.InUse(f"'{name}' is already being deleted; wait until it is gone")
    message = "removing the delta that Ostinato made; the fine-tune's files stay"
    operation = operations.begun(ctx, OperationKind.DELETE, name, Phase.DELETING, message, model.tenant)
    deleting = dataclasses.replace(model, phase=Phase.DELETING, reason="being deleted")
    changes: list[Change] = [Put(deleting, state.models[name].version), Put(operation, 0)]
    if (registering := open_operation(state, OperationKind.REGISTER, name)) is not None:
        ended = advance(registering, Phase.CANCELLED, "cancelled; the model was deleted", ctx.now_s, 1.0)
        changes.append(Put(ended, state.operations[registering.id].version))
    return Outcome(operation, changes)


def cancel_operation(state: State, operation_id: str, now_s: float) -> Outcome:
    """Request that an operation stops; a finished operation is returned as it is.

    Errors: OperationNotFound, InvalidRequest (an undeployment).
    """
    operation = find_operation(state, operation_id)
    op = operation.record
    if op.done or op.cancel_requested:
        return Outcome(op, [])
    if op.kind is OperationKind.UNDEPLOY:
        raise errors.InvalidRequest(
            "an undeployment cannot be cancelled; deploy the model again when the undeployment is done"
        )
    cancelling = advance(
        dataclasses.replace(op, cancel_requested=True), op.phase, "cancellation requested", now_s
    )
    return Outcome(cancelling, [Put(cancelling, operation.version)])
