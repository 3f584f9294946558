"""What was measured of a model's quality: kept with its record."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter

from controlplane import errors
from controlplane.api.routes.parameters import NamePath
from controlplane.api.services import Services, fresh_context
from controlplane.management.evaluations import with_evaluations
from controlplane.management.schemas.evaluations import EvaluationsRequest, EvaluationsView, EvaluationView
from controlplane.state import queries, transactions
from controlplane.state.records import Model


def router(services: Services) -> APIRouter:
    routes = APIRouter(prefix="/models", tags=["models"])

    @routes.get("/{name}/evaluations")
    async def list_evaluations(name: NamePath) -> EvaluationsView:
        """The figures that are kept with a model, the newest last."""
        return _view(queries.find_model(await services.read(), name))

    @routes.put("/{name}/evaluations")
    async def keep_evaluations(name: NamePath, body: EvaluationsRequest) -> EvaluationsView:
        """Keep figures; each takes the place of an older one of its task, metric and reference."""
        queries.find_model(await services.read(), name)
        now_s = fresh_context().now_s

        def change(model: Model) -> Model:
            return with_evaluations(model, body.evaluations, now_s)

        try:
            kept = await asyncio.to_thread(transactions.edit, services.repository, Model, name, change)
        except transactions.Superseded as e:
            raise errors.ModelNotFound(f"'{name}' was deleted meanwhile; register it again") from e
        return _view(kept.record)

    return routes


def _view(model: Model) -> EvaluationsView:
    return EvaluationsView(evaluations=[EvaluationView.of(each) for each in model.evaluations])
