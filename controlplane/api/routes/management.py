"""The management routes: MaverIQ's three calls (Table 1), and list, describe, watch, cancel, delete."""

from __future__ import annotations

import asyncio
import heapq
import json
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import PlainTextResponse

from controlplane import __version__, errors
from controlplane.api import operations, preview
from controlplane.api.inference import answering
from controlplane.api.inference.engine_call import engine_call
from controlplane.api.inference.request_record import RequestRecord
from controlplane.api.inference.streams import ClosingStream
from controlplane.api.middleware import tenant_of
from controlplane.api.own_names import INFERENCE, spoken_of_as
from controlplane.api.routes import cluster, estimates, evaluations, rebalancing, variants
from controlplane.api.routes.parameters import Asking, IdempotencyHeader, NamePath
from controlplane.api.services import Services, fresh_context
from controlplane.cluster import reservations
from controlplane.management.ownership import require_change
from controlplane.management.schemas.deploy import DeployModelRequest
from controlplane.management.schemas.models import (
    DeploymentView,
    ErrorBody,
    InferenceModelRequest,
    InferenceModelResponse,
    ModelView,
    OperationView,
    RegisterModelRequest,
    TuneRequest,
)
from controlplane.management.schemas.placement import PlanView, PreviewView, VariantsAtOnceView
from controlplane.management.schemas.status import DeviceView, EngineView, StatusView
from controlplane.state import queries
from controlplane.state.repository import State
from controlplane.state.worker_groups import base_of
from controlplane.traffic.endpoints import CHAT, COMPLETIONS, ENDPOINTS
from controlplane.traffic.request_terms import (
    Headers,
    RequestTerms,
    cut_at,
)
from controlplane.traffic.route_table import Route
from controlplane.traffic.tenants import DEFAULT, Caller, Tenant
from workers.messages import EngineCall

ERRORS: dict[int | str, dict[str, Any]] = {
    "default": {"model": ErrorBody, "description": "An error; docs/errors.md lists the codes."}
}
# Not `response_class=PlainTextResponse`, which would document errors as text as well.
TEXT: dict[int | str, dict[str, Any]] = {
    200: {"content": {"text/plain": {"schema": {"type": "string"}}}, "description": "Plain text."}
}


def router(services: Services) -> APIRouter:
    routes = APIRouter(responses=ERRORS)
    routes.include_router(_main_job(services))
    # A name may have a slash, so paths with a word behind the name come first.
    routes.include_router(estimates.router(services))
    routes.include_router(evaluations.router(services))
    routes.include_router(_models(services))
    routes.include_router(_deployments(services))
    routes.include_router(_operations(services))
    routes.include_router(cluster.router(services))
    routes.include_router(rebalancing.router(services))
    return routes


def _main_job(services: Services) -> APIRouter:
    routes = APIRouter(tags=["main job"])

    @routes.post("/register_model", status_code=202)
    async def register_model(
        body: RegisterModelRequest, caller: Asking, key: IdempotencyHeader = None
    ) -> OperationView:
        return OperationView.of(await operations.register(services, body, key, caller))

    @routes.post("/deploy_model", status_code=202)
    async def deploy_model(
        body: DeployModelRequest, caller: Asking, key: IdempotencyHeader = None
    ) -> OperationView:
        return OperationView.of(await operations.deploy(services, body, key, caller))

    @routes.post("/plan")
    async def plan_deployment(body: DeployModelRequest, caller: Asking) -> PreviewView:
        """What `POST /deploy_model` with this body would do now; nothing is changed."""
        state, inventory = await asyncio.gather(services.read_for(caller), services.cluster.inventory())
        require_change(caller.tenant, state, body.model)
        planned = await asyncio.to_thread(
            preview.preview, state, inventory, services.settings, body, fresh_context()
        )
        plan = None if planned.placement is None else PlanView.of(planned.placement)
        return PreviewView(
            model=planned.model,
            host=planned.base,
            running=planned.running,
            plan=plan,
            waits=planned.waits,
            variantsAtOnce=VariantsAtOnceView.of(planned.at_once),
        )

    @routes.post("/inference_model")
    async def inference_model(body: InferenceModelRequest, request: Request) -> InferenceModelResponse:
        with spoken_of_as(INFERENCE):
            return await infer(services, body, request.headers.raw, tenant_of(request.scope))

    return routes


def _models(services: Services) -> APIRouter:
    routes = APIRouter(prefix="/models", tags=["models"])

    @routes.get("")
    async def list_models(caller: Asking) -> dict[str, list[ModelView]]:
        state = await services.read_for(caller)
        return {"models": [model_view(state, name) for name in sorted(state.models)]}

    @routes.get("/{name:path}")
    async def describe_model(name: NamePath, caller: Asking) -> ModelView:
        return model_view(await services.read_for(caller), name)

    @routes.delete("/{name:path}")
    async def delete_model(name: NamePath, caller: Asking, key: IdempotencyHeader = None) -> OperationView:
        return OperationView.of(await operations.delete(services, name, key, caller))

    return routes


def _deployments(services: Services) -> APIRouter:
    routes = APIRouter(prefix="/deployments", tags=["deployments"])

    @routes.get("")
    async def list_deployments(caller: Asking) -> dict[str, list[DeploymentView]]:
        state = await services.read_for(caller)
        return {"deployments": await asyncio.to_thread(variants.describe_all, services, state)}

    @routes.post("/{name:path}/prefetch")
    async def prefetch_variant(name: NamePath, caller: Asking) -> DeploymentView:
        return await variants.prefetch(services, name, caller)

    @routes.get("/{name:path}/logs", response_class=Response, responses=TEXT)
    async def logs(
        name: NamePath, caller: Asking, lines: Annotated[int, Query(ge=1, le=10_000)] = 200
    ) -> Response:
        """An engine's log tells of all who ask it: a tenant reads those of its own bases."""
        state = await services.read_for(caller)
        base = variants.find_deployment(state, name).base
        require_change(caller.tenant, state, base)
        return PlainTextResponse(await services.cluster.logs(base, lines))

    @routes.get("/{name:path}")
    async def describe_deployment(name: NamePath, caller: Asking) -> DeploymentView:
        return await variants.describe(services, name, caller)

    @routes.patch("/{name:path}")
    async def tune_deployment(name: NamePath, body: TuneRequest, caller: Asking) -> DeploymentView:
        return await variants.tune(services, name, body, caller)

    @routes.delete("/{name:path}", status_code=202)
    async def undeploy_model(name: NamePath, caller: Asking, key: IdempotencyHeader = None) -> OperationView:
        return OperationView.of(await operations.undeploy(services, name, key, caller))

    return routes


def _operations(services: Services) -> APIRouter:
    routes = APIRouter(tags=["operations"])

    @routes.get("/operations")
    async def list_operations(
        caller: Asking, limit: Annotated[int, Query(ge=1, le=1000)] = 1000
    ) -> dict[str, list[OperationView]]:
        """The newest first."""
        all_of_them = (o.record for o in (await services.read_for(caller)).operations.values())
        newest = heapq.nlargest(limit, all_of_them, key=lambda o: o.created_at_s)
        return {"operations": [OperationView.of(o) for o in newest]}

    @routes.get("/operations/{operation_id}")
    async def describe_operation(operation_id: NamePath, caller: Asking) -> OperationView:
        found = queries.find_operation(await services.read_for(caller), operation_id)
        return OperationView.of(found.record)

    @routes.get(
        "/operations/{operation_id}/watch",
        response_class=Response,
        responses={200: {"content": {"text/event-stream": {}}, "description": "One event per change."}},
    )
    async def watch_operation(operation_id: NamePath, caller: Asking) -> Response:
        found = queries.find_operation(await services.read_for(caller), operation_id)
        events = operations.watch(services, found)
        return ClosingStream(events, events.aclose, media_type="text/event-stream")

    @routes.post("/operations/{operation_id}/cancel")
    async def cancel_operation(operation_id: NamePath, caller: Asking) -> OperationView:
        return OperationView.of(await operations.cancel(services, operation_id, caller))

    @routes.get("/status")
    async def status(caller: Asking) -> StatusView:
        """Devices, and the engines of the models that are there for who asks."""
        return await installation_status(services, caller)

    return routes


def model_view(state: State, name: str) -> ModelView:
    model = queries.find_model(state, name)
    variants = sorted(variant.name for variant in state.variants_of(name))
    return ModelView.of(model, name in state.deployments, variants)


async def infer(
    services: Services, body: InferenceModelRequest, headers: Headers = (), tenant: Tenant = DEFAULT
) -> InferenceModelResponse:
    """MaverIQ's inference_model: one text in, one text out, over the same path as the OpenAI routes."""
    with RequestRecord(services) as record:
        services.rates.request(tenant)
        route = await services.routes.resolve(body.model, tenant)
        record.resolved(route)
        limit = cut_at(CHAT, {"max_tokens": body.maxOutputLength}, route.max_output_tokens)
        terms = answering.terms_of(route, headers, {}, len(body.inputText), limit, tenant)
        record.charge_tenant(terms, ENDPOINTS[CHAT])
        answer = await _answer(services, route, body, record.terms)
        if record.charge is not None:
            record.charge.settle(answer.inputTokens + answer.outputTokens)
    record.end("ok")
    return answer


async def _answer(
    services: Services, route: Route, body: InferenceModelRequest, terms: RequestTerms
) -> InferenceModelResponse:
    """As `format` says. A model without a chat template completes the text, unless a chat was asked for."""
    note = ""
    if body.format != "raw":
        try:
            reply = await answering.ask(services, route, _chat_call(route, body, terms.tenant), terms)
            return _as_answer(body.model, reply.body, "chat", note)
        except errors.NoChatTemplate:
            if body.format == "chat":
                raise errors.NoChatTemplate(
                    f"'{body.model}' has no chat template; leave `format` out or send \"raw\", so that the "
                    "text is completed without a template",
                    param="format",
                ) from None
            note = f"'{body.model}' has no chat template, so the text was completed without a template"
    reply = await answering.ask(services, route, _raw_call(route, body, terms.tenant), terms)
    return _as_answer(body.model, reply.body, "raw", note)


def _chat_call(route: Route, body: InferenceModelRequest, tenant: Tenant) -> EngineCall:
    sent = {**_options(body), "messages": [{"role": "user", "content": body.inputText}]}
    return engine_call(CHAT, sent, route, tenant=tenant)


def _raw_call(route: Route, body: InferenceModelRequest, tenant: Tenant) -> EngineCall:
    """The engine's own limit of a completion would be a few tokens; null is the context's end."""
    sent = {"max_tokens": route.max_output_tokens, **_options(body), "prompt": body.inputText}
    return engine_call(COMPLETIONS, sent, route, tenant=tenant)


def _options(body: InferenceModelRequest) -> dict[str, Any]:
    options = {
        "max_tokens": body.maxOutputLength,
        "temperature": body.temperature,
        "top_p": body.topP,
        "seed": body.seed,
        "stop": body.stop,
    }
    return {"model": body.model, **{name: value for name, value in options.items() if value is not None}}


def _as_answer(model: str, body: bytes, asked: Literal["chat", "raw"], note: str) -> InferenceModelResponse:
    """Errors: EngineFailed when it is no completion."""
    try:
        reply = json.loads(body)
        choice, usage = reply["choices"][0], reply["usage"]
        text = choice["message"]["content"] if "message" in choice else choice["text"]
        return InferenceModelResponse(
            model=model,
            outputText=text or "",
            finishReason=choice.get("finish_reason"),
            inputTokens=usage["prompt_tokens"],
            outputTokens=usage["completion_tokens"],
            format=asked,
            note=note,
        )
    except (ValueError, LookupError, TypeError, AttributeError) as e:
        raise errors.EngineFailed("the engine's answer is not an OpenAI completion; try again") from e


async def installation_status(services: Services, caller: Caller) -> StatusView:
    state = await services.read_for(caller)
    engines, inventory = await asyncio.gather(services.cluster.observe(), services.cluster.inventory())
    free = reservations.available(inventory, state.ledgers, services.settings.headroom)
    variants: dict[str, list[str]] = {}
    for versioned in state.deployments.values():
        deployment = versioned.record
        if deployment.model != deployment.base:
            variants.setdefault(deployment.base, []).append(deployment.model)
    return StatusView(
        version=__version__,
        revision=state.revision,
        devices=[
            DeviceView(
                node=device.node,
                index=device.index,
                kind=device.kind,
                totalBytes=device.total_bytes,
                freeBytes=device.free_bytes,
            )
            for device in free.devices
        ],
        engines=[
            EngineView(
                host=base_of(group),
                group=group,
                status=view.status,
                message=view.message,
                replicas=view.replicas,
                variants=sorted(variants.get(base_of(group), ())),
            )
            for group, view in sorted(engines.items())
            if caller.tenant.is_admin or base_of(group) in state.deployments
        ],
    )
