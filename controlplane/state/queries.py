"""Look records up in a state, with the errors that users get."""

from __future__ import annotations

from controlplane import errors
from controlplane.state.records import Model, Operation
from controlplane.state.repository import State, Versioned
from workers.messages import VariantRef


def find_model(state: State, name: str, param: str = "model") -> Model:
    """A model. `param` is the field that names it. Errors: ModelNotFound."""
    model = state.models.get(name)
    if model is None:
        raise errors.ModelNotFound(
            f"no model named '{name}' is registered; `GET /models` lists the registered models", param=param
        )
    return model.record


def find_operation(state: State, operation_id: str) -> Versioned[Operation]:
    operation = state.operations.get(operation_id)
    if operation is None:
        raise errors.OperationNotFound(
            f"no operation '{operation_id}' exists; finished operations are deleted after some time"
        )
    return operation


def host_bytes(state: State, tenant: str, but_for: str = "") -> int:
    """Bytes of the tenant's registered variants, as stored in files; variants that were not read yet count
    0."""
    models = (versioned.record for versioned in state.models.values())
    return sum(
        m.variant_spec.weight_bytes
        for m in models
        if m.tenant == tenant and m.name != but_for and m.variant_spec is not None
    )


def require_host_bytes(state: State, model: Model) -> None:
    """Check that the variants of a model's tenant, including it, are within the quota. Errors:
    QuotaExceeded."""
    if model.max_host_bytes is None or model.variant_spec is None:
        return
    others, own = host_bytes(state, model.tenant, model.name), model.variant_spec.weight_bytes
    if others + own > model.max_host_bytes:
        raise errors.QuotaExceeded(
            f"the variants of tenant '{model.tenant}' may take {model.max_host_bytes} bytes, but with the "
            f"{own} bytes of '{model.name}' they would take {others + own}; delete a variant first"
        )


def variant_ref(model: Model) -> VariantRef:
    """The reference that travels with each request; only Ready variants have a path."""
    if not model.is_variant or model.path is None:
        raise errors.InvalidRequest(f"expected '{model.name}' to be a variant that is Ready")
    return VariantRef(name=model.name, uid=model.uid, path=model.path)
