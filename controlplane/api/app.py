"""The gateway's HTTP application, built from its services. Independent of Ray."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

from fastapi import FastAPI, Response
from fastapi.responses import HTMLResponse
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.types import ASGIApp, Receive, Scope, Send

from controlplane import __version__
from controlplane.api import error_handlers, hidden_paths
from controlplane.api.access import ASKING_PATHS
from controlplane.api.auditing import Audited
from controlplane.api.docs_page import page_of
from controlplane.api.front import Front
from controlplane.api.hidden_paths import Hide
from controlplane.api.inference.fast_path import InferencePath
from controlplane.api.middleware import BodyBounds, Guard
from controlplane.api.routes import inference, management, openai
from controlplane.api.services import Services
from controlplane.repeated_lines import REPEATED, Rarely

log = logging.getLogger(__name__)
log.addFilter(Rarely())

_DESCRIPTION = (
    "Register models, deploy them by intent, and send them requests. Many variants of a base share its batch."
)


def create_app(make_services: Callable[[], Services]) -> FastAPI:
    """Build the application. `make_services` is called once, in the serving process."""
    services = make_services()
    app = FastAPI(
        title="Ostinato",
        version=__version__,
        description=_DESCRIPTION,
        lifespan=_lifespan(services),
        docs_url=None,  # FastAPI's own page loads programs from other hosts, and sends no key
        redoc_url=None,
        redirect_slashes=False,
    )
    error_handlers.install(app, _hiding(services))
    app.add_middleware(InferencePath, services=services)
    app.add_middleware(Guard, **_guarding(services))
    app.add_middleware(Audited, audit=services.audit)
    app.add_middleware(Front, **_fronting(services))  # a request passes the last one first
    app.include_router(inference.router(services))  # first: routes are searched in order, by Serve as well
    app.include_router(openai.router(services))
    app.include_router(management.router(services))
    _add_probes(app, services)
    return app


def inference_only(services: Services) -> ASGIApp:
    """An application for the calls of `fast_path.PATHS` without FastAPI; a server asks it first."""
    return Front(Guard(InferencePath(_nothing, services), **_guarding(services)), **_fronting(services))


def _hiding(services: Services) -> Callable[[str], Hide]:
    """The function that gives, by path, how errors hide the server's files from clients."""
    of_managers = hidden_paths.for_managers(services.settings)
    return lambda path: services.hide if path in ASKING_PATHS else of_managers


async def _nothing(scope: Scope, receive: Receive, send: Send) -> None:
    raise AssertionError(f"{scope['path']} is not one of the calls that go first")


def _guarding(services: Services) -> dict[str, Any]:
    settings, limits = services.settings, services.limits
    return {
        "api_key": settings.api_key,
        "bodies": BodyBounds(settings.max_body_bytes, limits.body_parts, limits.body_timeout_s),
        "hosts": settings.hosts,
        "origins": settings.origins,
        "tenants": lambda: services.tenants.tenants,
    }


def _fronting(services: Services) -> dict[str, Any]:
    return {"origins": services.settings.origins, "max_body_bytes": services.settings.max_body_bytes}


def _lifespan(services: Services) -> Callable[[FastAPI], Any]:
    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        refreshing = (
            asyncio.create_task(services.routes.keep_fresh(_report)),
            asyncio.create_task(services.tenants.keep_fresh()),
        )
        try:
            yield
        finally:
            for task in refreshing:
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task

    return lifespan


def _report(error: Exception) -> None:
    log.warning(
        "the gateway could not refresh its routes, and keeps the last routes: %s", error, extra=REPEATED
    )


def _add_probes(app: FastAPI, services: Services) -> None:
    @app.get("/ping", tags=["probes"])
    @app.get("/health", tags=["probes"])
    @app.get("/healthz", tags=["probes"])
    async def healthz() -> dict[str, str]:
        """Health, under the paths that clients of vLLM, SageMaker and Kubernetes use."""
        return {"status": "ok"}

    @app.get("/version", tags=["probes"], responses=management.ERRORS)
    async def version() -> dict[str, str]:
        return {"version": __version__}

    @app.get("/docs", include_in_schema=False)
    async def docs() -> HTMLResponse:
        """The API's calls for people: one page, which needs nothing from other hosts."""
        return HTMLResponse(page_of(app.openapi()))

    @app.get("/readyz", tags=["probes"], responses=management.ERRORS)
    async def readyz() -> dict[str, Any]:
        """Ready once the gateway knows the routes: they stay in force while the state store is
        unreachable."""
        return {"status": "ok", "revision": (await services.routes.some()).revision}

    @app.get("/metrics", tags=["probes"], response_class=Response)
    async def metrics() -> Response:
        """This gateway replica's own metrics; scrape all processes through /metrics/targets."""
        return Response(generate_latest(), media_type=CONTENT_TYPE_LATEST)

    @app.get("/metrics/targets", tags=["probes"])
    async def targets() -> list[dict[str, Any]]:
        """Every process that serves metrics, in Prometheus' HTTP service discovery format."""
        addresses = await services.cluster.metrics_targets()
        return [
            {"targets": [address], "labels": {"component": what}} for address, what in addresses if address
        ]
