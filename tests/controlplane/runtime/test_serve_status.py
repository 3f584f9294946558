"""Serve's status of an engine; and an engine stopped without a thread that waits for it."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
from ray.serve.exceptions import RayServeException
from ray.serve.schema import (
    APIType,
    ApplicationDetails,
    ApplicationStatus,
    DeploymentDetails,
    DeploymentSchema,
    DeploymentStatus,
    DeploymentStatusTrigger,
    ReplicaDetails,
    ReplicaState,
)

from controlplane import errors
from controlplane.cluster.engine_status import EngineStatus
from controlplane.runtime import ray_cluster, serve
from controlplane.runtime.ray_cluster import RayCluster
from controlplane.settings import Settings

TRACE = "The deployment failed to start 2 times in a row. Error:\nTraceback\nRuntimeError: no memory"


def app(status: str, trigger: str = "UNSPECIFIED", running: int = 0, message: str = "") -> dict[str, Any]:
    """The form of Serve's controller."""
    states = [ReplicaState.RUNNING] * running or [ReplicaState.STARTING]
    deployment = DeploymentDetails(
        name="Engine",
        status=DeploymentStatus("UNHEALTHY"),
        status_trigger=DeploymentStatusTrigger(trigger),
        message=message,
        deployment_config=DeploymentSchema(name="Engine"),
        target_num_replicas=1,
        required_resources={},
        replicas=[ReplicaDetails(replica_id=f"{n}", state=s, start_time_s=0.0) for n, s in enumerate(states)],
    )
    told = ApplicationDetails(
        name="model-b",
        route_prefix=None,
        docs_path=None,
        status=ApplicationStatus(status),
        message="The deployments ['Engine'] are UNHEALTHY.",
        last_deployed_time_s=0.0,
        deployed_app_config=None,
        source=APIType.IMPERATIVE,
        external_scaler_enabled=False,
        deployments={"Engine": deployment},
    )
    found: dict[str, Any] = told.model_dump(exclude_unset=True)
    return found


@pytest.mark.parametrize(
    ("seen", "status"),
    [
        (app("UNHEALTHY", "HEALTH_CHECK_FAILED"), EngineStatus.UNHEALTHY),  # Serve is starting another
        (app("UNHEALTHY", "REPLICA_STARTUP_FAILED"), EngineStatus.FAILED),  # it failed as often as it may
        (app("UNHEALTHY", "REPLICA_STARTUP_FAILED", running=1), EngineStatus.UNHEALTHY),
        (app("DEPLOYING", "CONFIG_UPDATE_STARTED"), EngineStatus.STARTING),
        (app("DEPLOY_FAILED", "REPLICA_STARTUP_FAILED"), EngineStatus.FAILED),
        (app("DELETING", "REPLICA_STARTUP_FAILED"), EngineStatus.DELETING),
        (app("RUNNING", running=1), EngineStatus.RUNNING),
    ],
)
def test_the_states_of_serve_map_to_engine_states(seen: Any, status: EngineStatus) -> None:
    assert serve.engine_view(seen).status is status


@pytest.mark.parametrize("status", ["UNHEALTHY", "DEPLOY_FAILED"])
def test_why_an_engine_does_not_start_or_not_again(status: str) -> None:
    view = serve.engine_view(app(status, "REPLICA_STARTUP_FAILED", message=TRACE))
    assert view.message == TRACE


def test_serve_names_a_failed_start_only_when_it_failed_as_often_as_it_may() -> None:
    """The basis of `_gave_up` in Serve's own state machine: one failure leaves the trigger as it was."""
    from ray.serve._private.common import (
        DeploymentStatusInfo,
        DeploymentStatusInternalTrigger,
        DeploymentStatusTrigger,
    )

    ran = DeploymentStatusInfo("Engine", DeploymentStatus.HEALTHY, DeploymentStatusTrigger.UNSPECIFIED)
    died = ran.handle_transition(DeploymentStatusInternalTrigger.HEALTH_CHECK_FAILED)
    retried = died.update_message("A replica failed to start with exception. Retrying.")
    assert retried.status_trigger == "HEALTH_CHECK_FAILED"
    often = retried.handle_transition(DeploymentStatusInternalTrigger.REPLICA_STARTUP_FAILED)
    assert (often.status, often.status_trigger) == ("UNHEALTHY", "REPLICA_STARTUP_FAILED")
    runs = often.handle_transition(DeploymentStatusInternalTrigger.HEALTHY)
    assert runs.status_trigger == "UNSPECIFIED"


class FakeServe:
    def __init__(self, *names: str) -> None:
        self.names = set(names)
        self.leaving: set[str] = set()

    def delete(self, name: str, blocking: bool) -> None:
        assert not blocking
        self.leaving.add(name)

    def get_serve_details(self) -> dict[str, Any]:
        return {"applications": {name: app("RUNNING", running=1) for name in self.names}}


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> FakeServe:
    fake = FakeServe(*(f"model-b@{n}" for n in range(1, 9)))
    monkeypatch.setattr(ray_cluster, "ray_serve", SimpleNamespace(delete=fake.delete))
    monkeypatch.setattr(serve, "_get_global_client", lambda **asked: fake)
    monkeypatch.setattr(ray_cluster, "STOP_LOOK_S", 0.01)
    return fake


async def test_many_stops_leave_threads_to_others(served: FakeServe, settings: Settings) -> None:
    runtime = RayCluster(settings)
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(2))
    stops = [asyncio.create_task(runtime.stop(f"b@{n}")) for n in range(1, 9)]
    async with asyncio.timeout(30):
        while len(served.leaving) < 8:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        assert len(await runtime.observe()) == 8
    assert not any(stop.done() for stop in stops)
    served.names.clear()
    async with asyncio.timeout(30):
        await asyncio.gather(*stops)


async def test_a_stop_that_does_not_end_is_an_error(
    served: FakeServe, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_cluster, "STOP_TIMEOUT_S", 0.05)
    runtime = RayCluster(settings)
    with pytest.raises(TimeoutError):
        await runtime.stop("b@1")
    monkeypatch.setattr(ray_cluster, "STOP_TIMEOUT_S", 600)
    await runtime.stop("gone")


def test_an_engine_reports_the_installation_that_launched_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The identity is in Serve's data of the deployment. An older deployment has none."""
    told, before = app("RUNNING", running=1), app("RUNNING", running=1)
    config = told["deployments"]["Engine"]["deployment_config"]
    config["user_config"] = {"installation": "0123456789abcdef"}
    going = {**app("DELETING"), "name": "model-c"}
    found = {"model-a": told, "model-b": before, "model-c": going, "ostinato": app("RUNNING")}
    views = serve.engine_views(found)
    assert [views[name].installation for name in "abc"] == ["0123456789abcdef", "", ""]
    details = SimpleNamespace(get_serve_details=lambda: {"applications": found})
    monkeypatch.setattr(serve, "_get_global_client", lambda **options: details)
    assert serve.installations() == {"0123456789abcdef", ""}


def test_a_missing_answer_of_serve_does_not_mean_that_no_engine_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(**options: bool) -> None:
        if options["raise_if_no_controller_running"]:
            raise RayServeException("There is no Serve instance running on this Ray cluster.")

    monkeypatch.setattr(serve, "_get_global_client", absent)
    with pytest.raises(errors.Unavailable, match="does not list its applications"):
        serve.installations()
