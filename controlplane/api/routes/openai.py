"""OpenAI's list of models, and vLLM's two calls for adapters."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Response
from fastapi.responses import PlainTextResponse

from controlplane import errors
from controlplane.api import operations
from controlplane.api.own_names import ADAPTERS, spoken_of_as
from controlplane.api.routes.management import ERRORS, TEXT
from controlplane.api.routes.parameters import Asking
from controlplane.api.services import Services
from controlplane.management.schemas.deploy import DeployModelRequest
from controlplane.management.schemas.models import (
    LoadLoraAdapterRequest,
    RegisterModelRequest,
    UnloadLoraAdapterRequest,
)
from controlplane.state.records import Phase
from controlplane.traffic.route_table import RouteTable
from controlplane.traffic.tenants import Caller, Tenant


def router(services: Services) -> APIRouter:
    routes = APIRouter(prefix="/v1", tags=["openai"], responses=ERRORS)

    @routes.get("/models")
    async def models(caller: Asking) -> dict[str, Any]:
        table = await services.routes.newest()
        return {"object": "list", "data": model_cards(table, caller.tenant)}

    @routes.get("/models/{name:path}")
    async def model(name: str, caller: Asking) -> dict[str, Any]:
        table = await services.routes.newest()
        served = table.resolve(name, caller.tenant).model
        return next(card for card in model_cards(table, caller.tenant) if card["id"] == served)

    @routes.post("/load_lora_adapter", response_class=Response, responses=TEXT)
    async def load_lora_adapter(body: LoadLoraAdapterRequest, caller: Asking) -> Response:
        with spoken_of_as(ADAPTERS):
            await _load(services, body, caller)
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")

    @routes.post("/unload_lora_adapter", response_class=Response, responses=TEXT)
    async def unload_lora_adapter(body: UnloadLoraAdapterRequest, caller: Asking) -> Response:
        with spoken_of_as(ADAPTERS):
            await _unload(services, body.lora_name, caller)
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")

    return routes


def model_cards(table: RouteTable, tenant: Tenant) -> list[dict[str, Any]]:
    """Each model that is served to this tenant once, by its bare name: bases first, for some clients ask the
    first. Variants name their `parent`."""
    served = (r for name, r in table.routes.items() if name == r.model and tenant.sees(r.tenant))
    bare = sorted(served, key=lambda r: (r.variant is not None, r.model))
    return [
        {
            "id": r.model,
            "object": "model",
            "created": int(r.created_at_s),
            "owned_by": "ostinato",
            "root": r.base,
            "parent": r.base if r.variant else None,
            "max_model_len": r.context_tokens,
        }
        for r in bare
    ]


async def _load(services: Services, body: LoadLoraAdapterRequest, caller: Caller) -> None:
    """Register and deploy in one call, as vLLM's users expect; a refusal leaves nothing behind.

    Errors: those of both; TimedOut while it still goes on, and then it does.
    """
    base = body.base_model_name or await _only_base(services, caller)
    if base == body.lora_name:
        raise errors.InvalidRequest(
            "lora_name is the name of its base; choose another name for the adapter", param="lora_name"
        )
    register = RegisterModelRequest(model=body.lora_name, base=base, adapter=body.lora_path)
    await operations.run(services, operations.register(services, register, None, caller))
    try:
        deploy = DeployModelRequest(model=body.lora_name, maxOutputLength=await _output_limit(services, base))
        await operations.run(services, operations.deploy(services, deploy, None, caller))
    except errors.TimedOut:
        raise  # it goes on, and is not to be deleted
    except errors.OstinatoError:
        await operations.delete(services, body.lora_name, None, caller)
        raise


async def _output_limit(services: Services, base: str) -> int | None:
    deployment = (await services.read()).deployments.get(base)
    return deployment.record.max_output_tokens if deployment else None


async def _only_base(services: Services, caller: Caller) -> str:
    state = await services.read_for(caller)
    bases = [
        d.record.model
        for d in state.deployments.values()
        if d.record.model == d.record.base and d.record.phase is Phase.DEPLOYED
    ]
    if len(bases) != 1:
        raise errors.InvalidRequest(
            f"{len(bases)} bases are deployed ({', '.join(sorted(bases)) or 'none'}); name the adapter's "
            "base with `base_model_name`",
            param="base_model_name",
        )
    return bases[0]


async def _unload(services: Services, name: str, caller: Caller) -> None:
    state = await services.read_for(caller)
    model = state.models.get(name)
    if model is None or not model.record.is_variant:
        raise errors.ModelNotFound(f"The lora adapter '{name}' cannot be found.", param="lora_name")
    if name in state.deployments:
        await operations.run(services, operations.undeploy(services, name, None, caller))
    await operations.delete(services, name, None, caller)
