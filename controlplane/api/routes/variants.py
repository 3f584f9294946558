"""A deployment's variants while it runs: where they are, how many run at once, and reading one ahead."""

from __future__ import annotations

import asyncio
import logging

from controlplane import errors
from controlplane.api.operations import quota_turn
from controlplane.api.preview import require_room_anew
from controlplane.api.services import Services
from controlplane.management import commands, requested
from controlplane.management.ownership import not_own, require_change, require_engines
from controlplane.management.schemas.models import DeploymentView, TuneRequest
from controlplane.management.schemas.residency import EngineResidencyView
from controlplane.planning.variant_room import AtOnce, at_once_in
from controlplane.state import transactions
from controlplane.state.operations import last_failure
from controlplane.state.records import Deployment, OperationKind
from controlplane.state.repository import Put, State
from controlplane.traffic.tenants import Caller

log = logging.getLogger(__name__)


def find_deployment(state: State, name: str) -> Deployment:
    """Errors: NotDeployed, which says why the last one failed, if it did."""
    deployment = state.deployments.get(name)
    if deployment is None and (failed := last_failure(state, OperationKind.DEPLOY, name)) is not None:
        raise errors.NotDeployed(
            f"'{name}' is not deployed, because its last deployment failed: {failed.reason}"
        )
    if deployment is None:
        raise errors.NotDeployed(f"'{name}' is not deployed; GET /deployments lists the deployments")
    return deployment.record


async def describe(services: Services, name: str, caller: Caller) -> DeploymentView:
    """The deployment, and where those of its variants are that the caller sees. Errors: NotDeployed."""
    state = await services.read_for(caller)
    deployment = find_deployment(state, name)
    view = DeploymentView.of(deployment, at_once_of(services, state, deployment.base))
    if find_placed(state, deployment.base) is None:
        return view.model_copy(
            update={"residencyReason": f"the engine of '{deployment.base}' is not placed yet"}
        )
    try:
        seen = await services.cluster.residency(deployment.base)
    except errors.OstinatoError as e:
        return view.model_copy(update={"residencyReason": e.message})
    names = _variants(state, deployment)
    return view.model_copy(update={"residency": [EngineResidencyView.of(s, names) for s in seen]})


def describe_all(services: Services, state: State) -> list[DeploymentView]:
    """All that the caller sees, by name, without residency. For a thread: bases may have many variants."""
    deployments = sorted((d.record for d in state.deployments.values()), key=lambda d: d.model)
    bases = {base: at_once_of(services, state, base) for base in {d.base for d in deployments}}
    return [DeploymentView.of(d, bases[d.base]) for d in deployments]


def at_once_of(services: Services, state: State, base_name: str) -> AtOnce | None:
    """How many of the base's variants that the caller sees run at once in its engine."""
    placed, base = find_placed(state, base_name), state.models.get(base_name)
    if placed is None or base is None:
        return None
    return at_once_in(placed.placement, base.record, state.variants_of(base_name), services.settings)


def find_placed(state: State, base: str) -> Deployment | None:
    deployment = state.deployments.get(base)
    return deployment.record if deployment and deployment.record.placement is not None else None


def _variants(state: State, deployment: Deployment) -> dict[str, int]:
    """Uids by name: the variant itself, or all that are deployed on this base."""
    return {
        d.record.model: state.models[d.record.model].record.uid
        for d in state.deployments.values()
        if d.record.model in state.models
        and d.record.model != d.record.base
        and deployment.model in (d.record.base, d.record.model)
    }


async def tune(services: Services, name: str, request: TuneRequest, caller: Caller) -> DeploymentView:
    """Change how many variants of a base run at once, now and after every restart, or its replicas; what
    requests are served by; or begin to place its engines again.

    An engine that cannot be reached now learns the change from the next request, which carries it.
    Errors: NotDeployed, Forbidden (the base is the installation's), InvalidRequest, NotReady; NoFeasiblePlan
    (new engines have no room next to the old ones).
    """
    seen = await services.read_for(caller)
    uid = find_deployment(seen, name).uid
    require_change(caller.tenant, seen, name)
    limit = request.maxActiveVariants
    requested.require_ceilings(request.engine, services.settings)
    places_again = request.placeAnew or request.engine is not None
    inventory = await services.cluster.inventory() if places_again else None

    def change(deployment: Deployment) -> Deployment:
        if deployment.uid != uid:  # another one, perhaps another tenant's
            raise transactions.Superseded(name)
        if inventory is not None:
            state = services.repository.read()
            deployment = commands.place_anew(state, deployment, request.engine)
            require_room_anew(state, inventory, services.settings, deployment)
        if request.replicas is not None:
            deployment = commands.change_replicas(deployment, request.replicas)
        if request.targets is not None:
            deployment = commands.change_targets(deployment, request.targets)
        return deployment if limit is None else commands.limit_variants(deployment, limit)

    def once() -> None:
        state, present = services.repository.read(), services.repository.get(Deployment, name)
        if present is None:
            raise transactions.Superseded(name)
        changed, turn = change(present.record), list[Put]()
        if request.replicas is not None:
            require_engines(caller.tenant, state, [changed])
            turn = quota_turn(services.repository, caller.tenant, state)
        services.repository.commit([Put(changed, present.version), *turn])

    try:
        await asyncio.to_thread(transactions.persist, once, f"the deployment '{name}'")
    except transactions.Superseded as e:
        raise errors.NotDeployed(f"'{name}' was undeployed during this request; deploy it again") from e
    if limit is not None:
        try:
            await services.cluster.limit_variants(name, limit)
        except errors.OstinatoError as e:
            log.warning("the engine of '%s' did not get its new limit of %d variants: %s", name, limit, e)
    return await describe(services, name, caller)


async def prefetch(services: Services, name: str, caller: Caller) -> DeploymentView:
    """Have a variant in host memory, so that its next request finds it there. Repeating it is harmless.

    Errors: ModelNotFound, NotDeployed, Forbidden (it is the installation's), Unavailable, InvalidRequest (a
    base), AdapterMismatch.
    """
    route = await services.routes.resolve(name, caller.tenant)
    if not caller.tenant.may_change(route.tenant):
        raise not_own(caller.tenant, route.model)
    if route.variant is None:
        raise errors.InvalidRequest(
            f"'{name}' is a base, which stays in memory while it is deployed; name one of its variants"
        )
    await services.cluster.prefetch(route.base, route.variant)
    return await describe(services, route.model, caller)
