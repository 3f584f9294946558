"""What was measured of a model's quality: kept with its record."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter

from controlplane import errors
from controlplane.api.routes.parameters import Asking, NamePath
from controlplane.api.services import Services, fresh_context
from controlplane.management.evaluations import with_evaluations
from controlplane.management.ownership import require_change
from controlplane.management.schemas.evaluations import EvaluationsRequest, EvaluationsView, EvaluationView
from controlplane.state import queries, transactions
from controlplane.state.records import Model


def router(services: Services) -> APIRouter:
    routes = APIRouter(prefix="/models", tags=["models"])

    @routes.get("/{name:path}/evaluations")
    async def list_evaluations(name: NamePath, caller: Asking) -> EvaluationsView:
        """The figures that are kept with a model, the newest last."""
        return _view(queries.find_model(await services.read_for(caller), name))

    @routes.put("/{name:path}/evaluations")
    async def keep_evaluations(name: NamePath, body: EvaluationsRequest, caller: Asking) -> EvaluationsView:
        """Keep figures; each takes the place of an older one of its task, metric and reference."""
        seen = await services.read_for(caller)
        uid = queries.find_model(seen, name).uid
        require_change(caller.tenant, seen, name)
        now_s = fresh_context().now_s

        def change(model: Model) -> Model:
            if model.uid != uid:  # another one, perhaps another tenant's
                raise transactions.Superseded(name)
            return with_evaluations(model, body.evaluations, now_s)

        try:
            kept = await asyncio.to_thread(transactions.edit, services.repository, Model, name, change)
        except transactions.Superseded as e:
            raise errors.ModelNotFound(
                f"'{name}' was deleted during the evaluation; register it again"
            ) from e
        return _view(kept.record)

    return routes


def _view(model: Model) -> EvaluationsView:
    return EvaluationsView(evaluations=[EvaluationView.of(each) for each in model.evaluations])
