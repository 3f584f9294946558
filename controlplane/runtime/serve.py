"""Every call the control plane makes to Ray and Ray Serve. Nothing else imports them, but for the
application's own deployments (`app`) and the local cluster (`local`).

One worker group is one Serve application, `model-<group>`, with one deployment, `Engine`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import ray
from ray import serve
from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.serve.exceptions import DeploymentUnavailableError, RayServeException
from ray.serve.handle import DeploymentHandle
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from controlplane import errors
from controlplane.cluster.engine_status import EngineStatus, EngineView
from controlplane.runtime.engine_replica import ENGINE, engine_application
from controlplane.runtime.node_agents import node_name
from controlplane.settings import Settings
from workers.measuring.request import MeasureRequest
from workers.messages import EngineConfig, EngineResidency, VariantRef, WorkerReport

log = logging.getLogger(__name__)

CONTROL_APP = "ostinato"
APP_PREFIX = "model-"
RESTART_HINT_S = 5.0
FIND_TIMEOUT_S = 10.0
ASK_TIMEOUT_S = 15.0  # a replica's scheduler has 10 s of it
LOAD_TIMEOUT_S = 300.0
STOP_TIMEOUT_S = 60.0
STOP_LOOK_S = 0.5

_STATUS = {
    "NOT_STARTED": EngineStatus.STARTING,
    "DEPLOYING": EngineStatus.STARTING,
    "RUNNING": EngineStatus.RUNNING,
    "UNHEALTHY": EngineStatus.UNHEALTHY,
    "DEPLOY_FAILED": EngineStatus.FAILED,
    "DELETING": EngineStatus.DELETING,
}


def app_name(group: str) -> str:
    return f"{APP_PREFIX}{group}"


# --- the deployment's path ---------------------------------------------------------------------


async def launch(config: EngineConfig, settings: Settings) -> None:
    """Ask Serve for the engine of one worker group; returns before it runs (`observe` tells when it does).

    Errors: Unavailable when a node of the plan is gone; then another plan is needed.
    """
    planned = {rank.node for rank in config.ranks}
    node_ids = await _node_ids(planned)
    if gone := sorted(planned - node_ids.keys()):
        raise errors.Unavailable(f"the plan for '{config.name}' is for node {gone[0]}, which is gone")
    application = engine_application(config, settings, node_ids)
    await asyncio.to_thread(_deploy, application, app_name(config.group_name))


def _deploy(application: serve.Application, name: str) -> None:
    # serve.run would wait until the engine runs, and hold up every other deployment.
    serve.api._run(application, name=name, route_prefix=None, _blocking=False)


async def stop(group: str) -> None:
    """Stop the engine of a worker group and wait until it is gone. Stopping what is gone does nothing.

    No thread waits: there are few, and whoever reads the records or looks at the engines needs one.
    Errors: TimeoutError.
    """
    name = app_name(group)
    await asyncio.to_thread(serve.delete, name, False)
    async with asyncio.timeout(STOP_TIMEOUT_S):
        while True:
            status = await asyncio.to_thread(serve.status)
            if name not in status.applications:
                return
            await asyncio.sleep(STOP_LOOK_S)


async def observe() -> Mapping[str, EngineView]:
    """What Serve says of each worker group's engine."""
    status = await asyncio.to_thread(serve.status)
    return {
        name.removeprefix(APP_PREFIX): _view(app)
        for name, app in status.applications.items()
        if name.startswith(APP_PREFIX)
    }


def _view(app: Any) -> EngineView:
    deployment = app.deployments.get(ENGINE)
    replicas = deployment.replica_states.get("RUNNING", 0) if deployment else 0
    if deployment and not replicas and _gave_up(app, deployment):
        return EngineView(EngineStatus.FAILED, deployment.message, replicas)
    message = app.message or (deployment.message if deployment else "")
    return EngineView(_STATUS.get(app.status, EngineStatus.STARTING), message, replicas)


def _gave_up(app: Any, deployment: Any) -> bool:
    """Whether an engine that ran once could not be started again.

    Serve names this trigger after START_ATTEMPTS failures in a row, as of an engine that never ran; but this
    one it tries again for ever.
    """
    return bool(app.status == "UNHEALTHY" and deployment.status_trigger == "REPLICA_STARTUP_FAILED")


async def load_variant(group: str, variant: VariantRef) -> None:
    """Bring a variant into every replica. Raises AdapterMismatch if the engine refuses it."""
    await _broadcast(group, "load_variant", variant)


async def unload_variant(group: str, variant: VariantRef) -> None:
    """Take a variant out of every replica; an engine that is gone holds none."""
    with suppress(errors.Unavailable):
        await _broadcast(group, "unload_variant", variant)


async def prefetch(group: str, variant: VariantRef) -> None:
    """Have every replica hold a variant in group memory. Raises AdapterMismatch if the engine refuses it."""
    await _broadcast(group, "prefetch", variant)


async def limit_variants(group: str, limit: int) -> None:
    """Let every replica run at most `limit` variants at once, from now on."""
    await _broadcast(group, "limit_variants", limit, timeout_s=ASK_TIMEOUT_S)


async def residency(group: str) -> list[EngineResidency]:
    """Where each replica has its variants."""
    return await _broadcast(group, "residency", timeout_s=ASK_TIMEOUT_S)


async def reports(group: str) -> list[WorkerReport]:
    return await _broadcast(group, "report")


async def find_workers(group: str) -> list[WorkerReport]:
    """Reports of the workers that can give one now, for the request's path. Raises what Serve raises."""
    response = engine_handle(group).broadcast("report")
    found = await response.results_async(timeout_s=FIND_TIMEOUT_S, return_exceptions=True)
    return [report for report in found if isinstance(report, WorkerReport)]


async def logs(group: str, lines: int) -> str:
    return "".join(await _broadcast(group, "logs", lines, log_folder()))


def log_folder() -> str:
    """Where this cluster's processes write, on the node that asks."""
    return str(ray._private.worker._global_node.get_logs_dir_path())


async def _broadcast(group: str, method: str, *args: Any, timeout_s: float = LOAD_TIMEOUT_S) -> list[Any]:
    try:
        response = engine_handle(group).broadcast(method, *args)
        return list(await response.results_async(timeout_s=timeout_s))
    except Exception as e:
        raise _translated(e, group) from e


_handles: dict[str, DeploymentHandle] = {}


def engine_handle(group: str) -> DeploymentHandle:
    if group not in _handles:
        _handles[group] = serve.get_deployment_handle(ENGINE, app_name(group))
    return _handles[group]


def forget_handle(group: str) -> None:
    """After a group was stopped: a new application of the same name needs a new handle."""
    _handles.pop(group, None)


def _translated(e: Exception, group: str) -> errors.OstinatoError:
    match e:
        case errors.OstinatoError():
            return e
        case RayTaskError() if isinstance(e.cause, ValueError):
            return errors.AdapterMismatch(str(e.cause))
        case RayActorError():
            return errors.EngineFailed(
                f"the engine of '{group}' died during this call; it is being restarted, try again",
                retry_after_s=RESTART_HINT_S,
            )
        case DeploymentUnavailableError() | RayServeException():
            return errors.Unavailable(
                f"the engine of '{group}' is not there (starting or stopping); try again",
                retry_after_s=RESTART_HINT_S,
            )
        case _:
            log.error("the engine of %s failed: %r", group, e)
            return errors.EngineFailed(f"the engine of '{group}' failed: {_first_line(e)}")


def _first_line(e: Exception) -> str:
    cause = e.cause if isinstance(e, RayTaskError) else e
    lines = str(cause).strip().splitlines()
    return f"{type(cause).__name__}: {lines[0] if lines else ''}"[:300]


# --- profiles ----------------------------------------------------------------------------------


async def measure(request: MeasureRequest, node: str) -> AsyncGenerator[str, None]:
    """Lines of measurements as they are made, by a task on the named node. Errors: ProfilingFailed.

    Closing this kills the task's process, and the engine that it started ends with it.
    """
    from workers.measuring.engine_runs import carry_out

    strategy = NodeAffinitySchedulingStrategy(node_id=await _node_id(node), soft=False)
    task = ray.remote(carry_out).options(
        num_cpus=0, max_retries=0, num_returns="streaming", scheduling_strategy=strategy
    )
    lines = task.remote(request)
    try:
        async for line in lines:
            yield await line
    except RayError as e:
        raise errors.ProfilingFailed(_first_line(e).removeprefix("MeasuringError: ")) from e
    finally:
        ray.cancel(lines, force=True)


async def _node_ids(named: Iterable[str]) -> dict[str, str]:
    """Ray's id of each living node among the named ones."""
    found = {node_name(n): str(n["NodeID"]) for n in await asyncio.to_thread(ray.nodes) if n["Alive"]}
    return {name: found[name] for name in named if name in found}


async def _node_id(node: str) -> str:
    """Errors: ProfilingFailed when no living node has this name."""
    if found := await _node_ids([node]):
        return found[node]
    raise errors.ProfilingFailed(f"the node {node} is gone; profile again")


# --- the installation --------------------------------------------------------------------------


def convert_bundled(name: str, cache: Path) -> Path:
    """Make (once) the folder of a bundled model, in a process of its own: it needs torch. Blocking."""
    from workers import bundled

    convert = ray.remote(bundled.ensure).options(num_cpus=0)
    try:
        return Path(ray.get(convert.remote(name, cache)))
    except RayError as e:
        raise errors.SourceUnreadable(
            f"the bundled model '{name}' could not be converted: {_first_line(e)}",
            param="source",
        ) from e


async def demand() -> dict[str, float]:
    """Requests under way by base, over all gateways: the mean since this was last asked. Raises what Serve
    raises."""
    handle = serve.get_deployment_handle("Gateway", CONTROL_APP)
    found: dict[str, float] = {}
    for counts in await handle.broadcast("demand").results_async(timeout_s=FIND_TIMEOUT_S):
        for host, count in counts.items():
            found[host] = found.get(host, 0) + count
    return found


async def metrics_targets() -> list[tuple[str, str]]:
    """(address, component) of every process of ours that serves metrics."""
    found: list[tuple[str, str]] = []
    for component in ("Gateway", "Controller"):
        handle = serve.get_deployment_handle(component, CONTROL_APP)
        for address in await handle.broadcast("metrics_address").results_async(timeout_s=10):
            found.append((address, component.lower()))
    for group, view in (await observe()).items():
        if view.status is EngineStatus.RUNNING:
            found.extend((r.metrics_address, f"engine-{group}") for r in await reports(group))
    return found
