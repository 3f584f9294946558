"""Every private name of Ray's that we rely on, and every setting, exists in the Ray that is installed.

Ray promises none of them. Where an upgrade takes one away, this says which, and who relied on it. Read from
Ray's sources, so that it takes no second.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from controlplane.runtime import local
from controlplane.runtime.front_door import environment
from testkit import package_sources

LONG_POLL = "ray.serve._private.long_poll"
REPLICA = "ray.serve._private.replica"

# module, class, its methods and attributes
CLASSES = [
    # controlplane.runtime.patches.ray.serve_news
    (LONG_POLL, "LongPollClient", ("_process_update", "_schedule_to_event_loop", "is_running", "event_loop")),
    (LONG_POLL, "LongPollClient", ("_callbacks_processed_count", "_current_ref", "host_actor")),
    (LONG_POLL, "LongPollClient", ("snapshot_ids",)),
    (LONG_POLL, "LongPollHost", ("listen_for_change",)),
    # controlplane.runtime.serve
    ("ray.serve._private.client", "ServeControllerClient", ("get_serve_details",)),
    ("ray.serve.handle", "DeploymentBroadcastResponse", ("_fetch_replica_results_async",)),
    # controlplane.runtime.ray_cluster
    ("ray._private.node", "Node", ("get_logs_dir_path",)),
    # controlplane.runtime.replica_http
    (REPLICA, "Replica", ("_metrics_manager",)),
    (REPLICA, "ReplicaMetricsManager", ("record_request_metrics", "inc_num_ongoing_requests")),
    (REPLICA, "ReplicaMetricsManager", ("dec_num_ongoing_requests",)),
]
# module, function, the parameters that we give
FUNCTIONS = [
    ("ray.serve.context", "_get_global_client", ("raise_if_no_controller_running",)),
]
# module, variable
VARIABLES = [
    ("ray._private.worker", "_global_node"),  # controlplane.runtime.ray_cluster
    (LONG_POLL, "LISTEN_FOR_CHANGE_REQUEST_TIMEOUT_S"),  # controlplane.runtime.patches.ray.serve_news
    ("ray.serve._private.constants", "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD"),
]
OF_PYTHON = (
    "RAY_SERVE_",
    "LISTEN_FOR_",
    "RAY_USAGE_",
    "RAY_ENABLE_",
    "RAY_DEDUP_",
)  # Ray's core reads the others


@pytest.mark.parametrize(("module", "name", "wanted"), CLASSES)
def test_a_class_has_what_we_use(module: str, name: str, wanted: tuple[str, ...]) -> None:
    made = package_sources.class_in(package_sources.tree_of(module), name)
    missing = set(wanted) - package_sources.names_in(made)
    assert not missing, f"{name} in {module} has no {', '.join(sorted(missing))}"


@pytest.mark.parametrize(("module", "name", "given"), FUNCTIONS)
def test_a_function_takes_what_we_give(module: str, name: str, given: tuple[str, ...]) -> None:
    assert set(given) <= set(package_sources.parameters_of(module, name))


@pytest.mark.parametrize(("module", "name"), VARIABLES)
def test_a_variable_is_there(module: str, name: str) -> None:
    assert package_sources.source_of(module, name)


def settings() -> list[str]:
    """The variables that Ray's processes of a local cluster are started with, and that its Python reads."""
    names = {**local.ray_switches(), **environment.of_one_machine(Path("/tmp/x"), "1f")}
    return sorted(name for name in names if name.startswith(OF_PYTHON))


@cache
def sources() -> str:
    folder = package_sources.folder_of("ray")
    assert folder is not None
    places = ("serve/_private", "_private", "_common")
    return "\n".join(path.read_text() for place in places for path in (folder / place).rglob("*.py"))


@pytest.mark.parametrize("name", settings())
def test_a_setting_is_one_that_ray_reads(name: str) -> None:
    assert f'"{name}"' in sources()
