"""The ownership of models: the records that a tenant sees, and the changes that it may make. Pure.

Models without a tenant are the installation's: all tenants see and use them, and only admins change them. A
tenant does not see another tenant's models. A variant of a tenant's base belongs to that tenant, so a tenant
that sees a model sees its base.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

from controlplane import errors
from controlplane.management.schemas.models import RegisterModelRequest
from controlplane.state.queries import host_bytes
from controlplane.state.records import Deployment, Model, ModelProfile, PathProfile
from controlplane.state.repository import Change, Put, State, Versioned
from controlplane.traffic.tenants import Tenant

T = TypeVar("T")


def seen_by(tenant: Tenant, state: State) -> State:
    """The state without the records that this tenant may not see. A tenant sees only its own operations."""
    if tenant.is_admin:
        return state
    models = {name: m for name, m in state.models.items() if tenant.sees(m.record.tenant)}
    operations = {key: o for key, o in state.operations.items() if tenant.may_change(o.record.tenant)}
    deployments = _of(models, state.deployments)
    return replace(state, models=models, operations=operations, deployments=deployments)


def _of(models: Mapping[str, Versioned[Model]], found: Mapping[str, T]) -> dict[str, T]:
    return {name: each for name, each in found.items() if name in models}


def require_change(tenant: Tenant, seen: State, name: str) -> None:
    """Require that a tenant may change the model `name`, if the tenant sees one. Errors: Forbidden."""
    model = seen.models.get(name)
    if model is not None and not tenant.may_change(model.record.tenant):
        raise not_own(tenant, name)


def not_own(tenant: Tenant, name: str) -> errors.Forbidden:
    return errors.Forbidden(
        f"'{name}' belongs to the installation: tenant '{tenant.name}' may use it, but only an admin's key "
        "may change it",
        param="model",
    )


def require_own_changes(tenant: Tenant, state: State, changes: Sequence[Change]) -> None:
    """Require that a tenant changes only its own records. Errors: Forbidden."""
    if tenant.is_admin:
        return
    made = {c.record.name: c.record for c in changes if isinstance(c, Put) and isinstance(c.record, Model)}
    for change in changes:
        name = _changed(state, change)
        if name is None:
            continue
        model = state.models[name].record if name in state.models else made.get(name)
        if model is None or not tenant.may_change(model.tenant):
            raise not_own(tenant, name)


def _changed(state: State, change: Change) -> str | None:
    """The model that a change concerns; None if nothing changes, or no model is concerned."""
    if not isinstance(change, Put):
        return change.key if change.cls in (Model, Deployment, ModelProfile, PathProfile) else None
    record = change.record
    match record:
        case Model(name=name):
            present: Model | Deployment | None = _record(state.models, name)
        case Deployment(model=name):
            present = _record(state.deployments, name)
        case ModelProfile(key=name) | PathProfile(key=name):
            return name
        case _:
            return None
    return None if present == record else name


def _record(found: Mapping[str, Versioned[T]], name: str) -> T | None:
    return found[name].record if name in found else None


def require_free(tenant: Tenant, state: State, name: str) -> None:
    """Require that no other tenant's model has this name; the error does not name the owner. Errors:
    AlreadyExists."""
    if name in state.models and not tenant.sees(state.models[name].record.tenant):
        raise errors.AlreadyExists(f"the name '{name}' is taken; choose another name", param="model")


def require_quota(tenant: Tenant, state: State, request: RegisterModelRequest) -> None:
    """Require that a tenant's quota allows one more base or variant. Errors: QuotaExceeded.

    The size of the new model is not known yet: the controller checks again when the model was read.
    """
    quota = tenant.quota
    if tenant.is_admin:
        return
    if request.base is None:
        _require_bases(tenant, state)
        return
    own = sum(m.record.is_variant and m.record.tenant == tenant.name for m in state.models.values())
    if quota.max_variants is not None and own >= quota.max_variants:
        raise errors.QuotaExceeded(
            f"tenant '{tenant.name}' may have at most {quota.max_variants} variants and has {own}; delete a "
            "variant first"
        )
    if quota.max_host_bytes is not None and (held := host_bytes(state, tenant.name)) >= quota.max_host_bytes:
        raise errors.QuotaExceeded(
            f"the variants of tenant '{tenant.name}' may take at most {quota.max_host_bytes} bytes and take "
            f"{held}; delete a variant first"
        )


def _require_bases(tenant: Tenant, state: State) -> None:
    bound = tenant.quota.max_bases
    own = sum(not m.record.is_variant and m.record.tenant == tenant.name for m in state.models.values())
    if bound is not None and own >= bound:
        raise errors.QuotaExceeded(
            f"tenant '{tenant.name}' may have at most {bound} bases and has {own}; delete a base first"
        )


def require_engines(tenant: Tenant, state: State, changed: Iterable[Deployment]) -> None:
    """Require that a tenant's bases, with these `changed` deployments, stay within its quota of engines.

    Present engines stay: a lowered quota refuses only requests for more. Errors: QuotaExceeded.
    """
    bound = tenant.quota.max_engines
    if tenant.is_admin or bound is None:
        return
    bases = {name for name, m in state.models.items() if m.record.tenant == tenant.name}
    before = {n: _engines(d.record) for n, d in state.deployments.items() if n in bases}
    after = before | {d.model: _engines(d) for d in changed if d.model in bases}
    wanted = sum(after.values())
    if wanted > bound and wanted > sum(before.values()):
        raise errors.QuotaExceeded(
            f"the bases of tenant '{tenant.name}' may have at most {bound} engines together, but with this "
            f"deployment they could have {wanted} (the sum of replicas.max); undeploy a base, or lower "
            "replicas.max",
            param="replicas",
        )


def _engines(deployment: Deployment) -> int:
    """The largest number of engines of a deployment; a variant's deployment has none of its own."""
    return 0 if deployment.model != deployment.base else max(1, deployment.scaling.max_groups)
