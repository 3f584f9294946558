"""The routes of profiles and estimates."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TypeVar

from fastapi import APIRouter

from controlplane.api import operations
from controlplane.api.routes.parameters import Asking, IdempotencyHeader, NamePath
from controlplane.api.services import Services
from controlplane.cluster import reservations
from controlplane.management.schemas.estimates import (
    EstimateRequest,
    EstimateView,
    LoadRequest,
    PlansRequest,
    PlansView,
    ProfileRequest,
    ProfileView,
)
from controlplane.management.schemas.models import OperationView
from controlplane.planning import estimates
from controlplane.state import queries
from controlplane.state.repository import State
from controlplane.traffic.tenants import Caller
from placement.types import Inventory

T = TypeVar("T")


def router(services: Services) -> APIRouter:
    routes = APIRouter(prefix="/models/{name:path}", tags=["estimates"])

    @routes.get("/profile")
    async def describe_profile(name: NamePath, caller: Asking) -> ProfileView:
        return profile_view(await services.read_for(caller), name)

    @routes.post("/profile", status_code=202)
    async def profile_model(
        name: NamePath, body: ProfileRequest, caller: Asking, key: IdempotencyHeader = None
    ) -> OperationView:
        """Measure what the profile of this model's architecture lacks."""
        return OperationView.of(await operations.profile(services, name, body.again, key, caller))

    @routes.post("/estimate")
    async def estimate_plan(name: NamePath, body: EstimateRequest, caller: Asking) -> EstimateView:
        """What a plan costs under a load; nothing is changed."""
        estimate = await _with_devices(
            services,
            caller,
            lambda state, devices: estimates.answer(
                state, devices, services.settings, name, _shape(body), _load(body)
            ),
        )
        return EstimateView.of(estimate)

    @routes.post("/plans")
    async def estimate_plans(name: NamePath, body: PlansRequest, caller: Asking) -> PlansView:
        """What every plan costs under a load; nothing is changed."""
        answers = await _with_devices(
            services,
            caller,
            lambda state, devices: estimates.answer_all(state, devices, services.settings, name, _load(body)),
        )
        return PlansView(plans=[EstimateView.of(answer) for answer in answers])

    return routes


def _load(body: LoadRequest) -> estimates.Load:
    return estimates.Load(body.batch, body.inputTokens, body.outputTokens, tuple(body.variants), body.devices)


def _shape(body: EstimateRequest) -> estimates.Shape:
    split = None if body.layersPerStage is None else tuple(body.layersPerStage)
    return estimates.Shape(body.tensorParallel, body.pipelineParallel, split, body.quantization)


async def _with_devices(services: Services, caller: Caller, estimate: Callable[[State, Inventory], T]) -> T:
    """Run `estimate` on what the caller sees of the state, and the free devices, in a thread since many plans
    take a while."""
    state, inventory = await asyncio.gather(services.read_for(caller), services.cluster.inventory())
    rested = reservations.without_starts(inventory, state, time.time())
    free = reservations.available(rested, state.ledgers, services.settings.headroom)
    return await asyncio.to_thread(estimate, state, free)


def profile_view(state: State, name: str) -> ProfileView:
    """A variant has the profile of its base. Errors: ModelNotFound."""
    model = queries.find_model(state, name)
    base = queries.find_model(state, model.base) if model.base else model
    profile = state.profiles.get(base.profile or "")
    return ProfileView.of(base.name, profile.record if profile else None)
