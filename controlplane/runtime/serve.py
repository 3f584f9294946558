"""The control plane's calls to Ray Serve: names and status of applications, calls to replicas.

One worker group is one Serve application, `model-<group>`, with one deployment, `Engine`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import Any

from ray import serve
from ray.exceptions import RayActorError, RayTaskError
from ray.serve.context import _get_global_client
from ray.serve.exceptions import DeploymentUnavailableError, RayServeException
from ray.serve.handle import DeploymentHandle

from controlplane import errors
from controlplane.cluster.engine_status import EngineStatus, EngineView
from controlplane.gateway.engine_errors import refused
from controlplane.runtime.engine_replica import ENGINE, INSTALLATION
from workers.messages import from_file_name, in_file_names

log = logging.getLogger(__name__)

CONTROL_APP = "ostinato"
APP_PREFIX = "model-"
RESTART_HINT_S = 5.0
LOAD_TIMEOUT_S = 300.0

_STATUS = {
    "NOT_STARTED": EngineStatus.STARTING,
    "DEPLOYING": EngineStatus.STARTING,
    "RUNNING": EngineStatus.RUNNING,
    "UNHEALTHY": EngineStatus.UNHEALTHY,
    "DEPLOY_FAILED": EngineStatus.FAILED,
    "DELETING": EngineStatus.DELETING,
}


def app_name(group_id: str) -> str:
    return f"{APP_PREFIX}{in_file_names(group_id)}"


# --- applications ------------------------------------------------------------------------------


def deploy(application: serve.Application, name: str) -> None:
    """Deploy an application. Blocks, but returns before the application runs."""
    target = serve.RunTarget(application, name=name, route_prefix=None)
    # serve.run would wait until the engine runs, and hold up every other deployment.
    serve.run_many([target], wait_for_applications_running=False)


Application = Mapping[str, Any]


def applications() -> Mapping[str, Application]:
    """Serve's report of each application, in the form of its schema ApplicationDetails. Blocking.

    Serve's public `status` reads the same data, but pickles a class for each deployment on every call. That
    took most of an idle controller's CPU time.
    """
    client = _get_global_client(raise_if_no_controller_running=False)
    found: Mapping[str, Application] = client.get_serve_details()["applications"] if client else {}
    return found


def engine_views(seen: Mapping[str, Application]) -> dict[str, EngineView]:
    """The status of each worker group's engine in Serve's report."""
    return {
        from_file_name(name.removeprefix(APP_PREFIX)): engine_view(app)
        for name, app in seen.items()
        if name.startswith(APP_PREFIX)
    }


def engine_view(app: Application) -> EngineView:
    deployment = app["deployments"].get(ENGINE)
    replicas = sum(r["state"] == "RUNNING" for r in deployment["replicas"]) if deployment else 0
    installation = _installation(deployment) if deployment else ""
    if deployment and not replicas and _gave_up(app, deployment):
        return EngineView(EngineStatus.FAILED, deployment["message"], replicas, installation)
    message = app["message"] or (deployment["message"] if deployment else "")
    return EngineView(_STATUS.get(app["status"], EngineStatus.STARTING), message, replicas, installation)


def installations() -> set[str]:
    """The installations for which the running engines were launched. Blocking.

    Errors: Unavailable, where Serve does not report its engines: an empty result would be wrong.
    """
    try:
        client = _get_global_client(raise_if_no_controller_running=True)
        views = engine_views(client.get_serve_details()["applications"]).values()
    except Exception as e:
        raise errors.Unavailable(f"Ray Serve does not list its applications: {e!r}", retry_after_s=1.0) from e
    return {view.installation for view in views if view.status is not EngineStatus.DELETING}


def _installation(deployment: Mapping[str, Any]) -> str:
    told = deployment.get("deployment_config", {}).get("user_config") or {}
    return str(told.get(INSTALLATION, ""))


def _gave_up(app: Application, deployment: Mapping[str, Any]) -> bool:
    """Tell whether Serve failed to start an engine: then the deployment gives the reason, the application
    does not.

    Serve names this trigger after START_ATTEMPTS failures in a row. Serve still retries an engine that ran
    before without end, and calls its application UNHEALTHY.
    """
    failed = app["status"] in ("UNHEALTHY", "DEPLOY_FAILED")
    return bool(failed and deployment["status_trigger"] == "REPLICA_STARTUP_FAILED")


# --- replicas ----------------------------------------------------------------------------------


async def ask_replicas(
    group_id: str, method: str, *args: Any, timeout_s: float = LOAD_TIMEOUT_S
) -> list[Any]:
    """The answers of all replicas of a worker group. Raises an OstinatoError that names the problem."""
    try:
        response = engine_handle(group_id).broadcast(method, *args)
        return list(await response.results_async(timeout_s=timeout_s))
    except Exception as e:
        raise _translated(e, group_id) from e


async def ask_own(component: str, method: str, timeout_s: float, *args: Any) -> list[Any]:
    """The answers of all our gateways, or of the controller. Raises Serve's errors."""
    return list(await own_handle(component).broadcast(method, *args).results_async(timeout_s=timeout_s))


def own_handle(component: str) -> DeploymentHandle:
    """The handle of our "Gateway" or "Controller"."""
    return serve.get_deployment_handle(component, CONTROL_APP)


async def answers_of(handle: DeploymentHandle, method: str, timeout_s: float) -> list[Any]:
    """The answers of the replicas of a deployment that answer in time. One replica's failure hides no
    other answer."""
    try:
        # Serve's public `results_async` returns no answer at all when one replica hangs.
        broadcast = handle.broadcast(method)._fetch_replica_results_async()
        results = await asyncio.wait_for(broadcast, timeout_s)
    except Exception as e:
        log.info("no replica of %s answers: %r", handle.deployment_name, e)
        return []
    each = (asyncio.wait_for(result.get_async(), timeout_s) for result in results)
    answers = await asyncio.gather(*each, return_exceptions=True)
    return [answer for answer in answers if not isinstance(answer, BaseException)]


_handles: dict[str, DeploymentHandle] = {}


def engine_handle(group_id: str) -> DeploymentHandle:
    if group_id not in _handles:
        _handles[group_id] = serve.get_deployment_handle(ENGINE, app_name(group_id))
    return _handles[group_id]


def forget_handle(group_id: str) -> None:
    """Forget the handle of a stopped group: a new application of the same name needs a new handle."""
    _handles.pop(group_id, None)


def _translated(e: Exception, group_id: str) -> errors.OstinatoError:
    """An error of Serve or of the engine, as an OstinatoError. A caller that is itself a replica gets the
    engine's own errors bare; other callers get them within a RayTaskError."""
    match e:
        case errors.OstinatoError():
            return e
        case RayTaskError() | ValueError() if isinstance(refusal := cause(e), ValueError):
            return refused(refusal)
        case RayActorError():
            return errors.EngineFailed(
                f"the engine of '{group_id}' died during this call; it is being restarted, try again",
                retry_after_s=RESTART_HINT_S,
            )
        case DeploymentUnavailableError() | RayServeException():
            return errors.Unavailable(
                f"the engine of '{group_id}' is not available (it starts or stops); try again",
                retry_after_s=RESTART_HINT_S,
            )
        case _:
            log.error("the engine of %s failed: %r", group_id, e)
            return errors.EngineFailed(f"the engine of '{group_id}' failed: {first_line(e)}")


def first_line(e: Exception) -> str:
    """The cause of a Ray error in one line."""
    found = cause(e)
    lines = str(found).strip().splitlines()
    return f"{type(found).__name__}: {lines[0] if lines else ''}"[:300]


def cause(e: Exception) -> BaseException:
    """The error that an engine, an agent or a task raised, without Ray's wrapper."""
    return e.cause if isinstance(e, RayTaskError) else e
