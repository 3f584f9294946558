"""Looking records up in a state, with the errors that users get."""

from __future__ import annotations

from controlplane import errors
from controlplane.state.records import Model, Operation
from controlplane.state.repository import State, Versioned
from workers.messages import VariantRef


def find_model(state: State, name: str) -> Model:
    model = state.models.get(name)
    if model is None:
        raise errors.ModelNotFound(
            f"no model named '{name}' is registered; `GET /models` lists those that are", param="model"
        )
    return model.record


def find_operation(state: State, operation_id: str) -> Versioned[Operation]:
    operation = state.operations.get(operation_id)
    if operation is None:
        raise errors.OperationNotFound(f"no operation '{operation_id}'; old ones are forgotten after a while")
    return operation


def variant_ref(model: Model) -> VariantRef:
    """The reference that travels with each request; only Ready variants have a path."""
    if not model.is_variant or model.path is None:
        raise errors.InvalidRequest(f"'{model.name}' is not a variant that is Ready")
    return VariantRef(name=model.name, uid=model.uid, path=model.path)
