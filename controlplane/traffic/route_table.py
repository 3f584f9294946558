"""The base whose engines serve a model name: a pure function of the state.

`controlplane.routing` chooses one of these engines for each request.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace

from controlplane import errors
from controlplane.state.queries import variant_ref
from controlplane.state.records import Deployment, Model, Phase, ServingTargets
from controlplane.state.repository import State
from controlplane.state.worker_groups import GroupPhase, base_of
from controlplane.traffic.tenants import DEFAULT, Tenant
from workers.messages import VariantRef


@dataclass(frozen=True)
class Route:
    """`base` is the base whose engine serves `model`; `variant` is None for the base itself.

    At most `variant_limit` variants of the base run at once; None: as many as it has slots. `targets` apply
    to requests that give none. `tenant` owns the model; "": all tenants may use it. `context_tokens` is the
    longest prompt and answer together, `requests_at_once` the requests that an engine runs; None: no engine
    has a place yet. Answers are cut at `max_output_tokens`; None: at the context's end.
    """

    model: str
    base: str
    max_output_tokens: int | None
    variant: VariantRef | None
    created_at_s: float
    variant_limit: int | None = None
    targets: ServingTargets = field(default_factory=ServingTargets)
    tenant: str = ""
    context_tokens: int | None = None
    requests_at_once: int | None = None


@dataclass(frozen=True)
class RouteTable:
    """The served models by each of their names, and what to answer for other names.

    `groups` are the ids of the worker groups that take new requests, by their base. Only groups that are
    `alive` can have requests under way.
    """

    revision: int
    routes: Mapping[str, Route]
    waiting: Mapping[str, Deployment]
    registered: Mapping[str, Model]
    groups: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    alive: frozenset[str] = frozenset()

    def known(self, name: str, tenant: Tenant = DEFAULT) -> Route | None:
        """The route of a name that is served to this tenant; None: of any other name."""
        route = self.routes.get(name)
        return route if route is not None and tenant.sees(route.tenant) else None

    def resolve(self, name: str, tenant: Tenant = DEFAULT) -> Route:
        """The route of a name. Other tenants' models count as missing.

        Errors: ModelNotFound, NotDeployed, Unavailable (being deployed: with a time to retry).
        """
        if (route := self.known(name, tenant)) is not None:
            return route
        bare = name.rsplit(":", 1)[-1]
        if not self._sees(tenant, bare):
            bare = ""
        if (waiting := self.waiting.get(bare)) is not None and self._means(name, bare):
            raise errors.Unavailable(
                f"'{name}' is {waiting.phase}{': ' + waiting.reason if waiting.reason else ''}; try again",
                param="model",
                retry_after_s=5,
            )
        if bare in self.registered and self._means(name, bare):
            raise errors.NotDeployed(
                f"'{name}' is registered, but not deployed; deploy it with POST /deploy_model", param="model"
            )
        raise errors.ModelNotFound(
            f"The model '{name}' does not exist; GET /v1/models lists the served models", param="model"
        )

    def _sees(self, tenant: Tenant, bare: str) -> bool:
        """Whether the tenant may see the model. A model without a readable record may belong to any
        tenant."""
        model = self.registered.get(bare)
        return tenant.is_admin if model is None else tenant.sees(model.tenant)

    def _means(self, name: str, bare: str) -> bool:
        model = self.registered.get(bare)
        return name == bare or (model is not None and name == f"{model.base}:{bare}")


def build_table(state: State, last: RouteTable | None = None) -> RouteTable:
    """The table of a state. Routes of the `last` table stay if the state's records of them are unreadable."""
    made = _of_state(state)
    if last is None or not state.undecodable:
        return made

    def is_kept(route: Route) -> bool:
        """Whether its own records exist or are unreadable, and it depends on an unreadable record."""
        own = state.deployments.get(route.model)
        is_deployed = own is not None and own.record.phase is Phase.DEPLOYED
        hangs_on = (
            state.unreadable(cls, n) for n in (route.model, route.base) for cls in (Deployment, Model)
        )
        return (
            (is_deployed or state.unreadable(Deployment, route.model))
            and (route.model in state.models or state.unreadable(Model, route.model))
            and any(hangs_on)
        )

    missing = {name: route for name, route in last.routes.items() if name not in made.routes}
    routes = {name: route for name, route in missing.items() if is_kept(route)}
    groups = {base: ids for base, ids in last.groups.items() if state.unreadable(Deployment, base)}
    alive = {group_id for group_id in last.alive if state.unreadable(Deployment, base_of(group_id))}
    waiting = {name: d for name, d in made.waiting.items() if name not in routes}
    return replace(
        made,
        routes={**made.routes, **routes},
        waiting=waiting,
        groups={**made.groups, **groups},
        alive=made.alive | alive,
    )


def _of_state(state: State) -> RouteTable:
    models = {name: versioned.record for name, versioned in state.models.items()}
    routes: dict[str, Route] = {}
    waiting: dict[str, Deployment] = {}
    for name, versioned in state.deployments.items():
        deployment, model = versioned.record, models.get(name)
        if model is None or not _is_served(deployment, state):
            waiting[name] = deployment
            continue
        route = _route(model, deployment, state.deployments[deployment.base].record)
        routes[name] = route
        if model.base is not None:
            routes[f"{model.base}:{name}"] = route
    groups = {name: versioned.record.serving_ids() for name, versioned in state.deployments.items()}
    serving = {name: ids for name, ids in groups.items() if ids}
    return RouteTable(state.revision, routes, waiting, models, serving, _alive(state))


def _alive(state: State) -> frozenset[str]:
    """The ids of the groups that serve or are being drained. No other group answers."""
    alive = (GroupPhase.SERVING, GroupPhase.DRAINING)
    return frozenset(
        group_id
        for deployment in state.deployments.values()
        for group_id, group in zip(deployment.record.group_ids(), deployment.record.groups, strict=True)
        if group.phase in alive
    )


def _is_served(deployment: Deployment, state: State) -> bool:
    """Whether a deployment is served; a variant is served only while its base's engine is."""
    base = state.deployments.get(deployment.base)
    return deployment.phase is Phase.DEPLOYED and base is not None and base.record.phase is Phase.DEPLOYED


def _route(model: Model, deployment: Deployment, base: Deployment) -> Route:
    return Route(
        model=model.name,
        base=deployment.base,
        max_output_tokens=deployment.max_output_tokens,
        variant=variant_ref(model) if model.is_variant else None,
        created_at_s=deployment.created_at_s,
        variant_limit=base.max_active_variants,
        targets=_targets(deployment, base),
        tenant=model.tenant,
        context_tokens=base.placement.plan.max_model_len if base.placement else None,
        requests_at_once=base.placement.plan.sequences if base.placement else None,
    )


def _targets(deployment: Deployment, base: Deployment) -> ServingTargets:
    """Each target from the first source that gives it: the deployment, its SLOs, its base, its base's
    SLOs."""
    given = (deployment.targets, _of_slos(deployment), base.targets, _of_slos(base))
    targets = {
        name: next((value for source in given if (value := getattr(source, name)) is not None), None)
        for name in (field.name for field in fields(ServingTargets))
    }
    return ServingTargets(**targets)


def _of_slos(deployment: Deployment) -> ServingTargets:
    return ServingTargets(ttft_s=deployment.slos.ttft_s, tpot_s=deployment.slos.tpot_s)
