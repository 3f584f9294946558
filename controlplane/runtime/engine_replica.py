"""The Serve application of one worker: its processes, its nodes and its health checks."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import ray
from ray import serve
from ray.serve.schema import LoggingConfig

from controlplane.runtime.follower_actors import OtherMembers
from controlplane.runtime.loopback import keep_replica_on_loopback
from controlplane.runtime.replica_logs import log_at_once
from controlplane.settings import Settings
from workers.addresses import Ports
from workers.clean_environment import forget_secrets
from workers.group.launch import Launch
from workers.messages import EngineConfig
from workers.server.worker import Worker

ENGINE = "Engine"
INSTALLATION = "installation"

# Serve retries a constructor 20 times by default; a model that cannot start must report it soon.
START_ATTEMPTS = 2
# Every Ray node has this label; Serve has no other way to name a node.
NODE_LABEL = "ray.io/node-id"


class EngineReplica(Worker):
    """A worker as Ray Serve runs it, with the other members of its group. Requests go to its HTTP
    server, not through Serve."""

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self,
        config: EngineConfig,
        metrics_host: str,
        metrics_ports: Ports,
        worker_host: str,
        node_ids: Mapping[str, str],
    ) -> None:
        keep_replica_on_loopback()
        log_at_once()
        forget_secrets()
        address = ray.util.get_node_ip_address()
        self._others = OtherMembers(config, node_ids, address)
        launch = Launch(config, self._others.rendezvous, address)
        super().__init__(config, metrics_host, launch, metrics_ports, address)
        self._others.start(self.abort)
        try:
            await self.start()
        except Exception:
            await asyncio.to_thread(self._others.stop)
            raise
        await self.open_door(worker_host)

    def reconfigure(self, user_config: Mapping[str, str]) -> None:
        """Do nothing. Serve requires this method where there is a `user_config`, which the engine does not
        need."""

    async def __del__(self) -> None:
        """Close the worker. Serve awaits this when it stops a replica; running requests may end first."""
        await self.close()
        await asyncio.to_thread(self._others.stop)


def engine_application(
    config: EngineConfig, settings: Settings, node_ids: Mapping[str, str] = MappingProxyType({})
) -> serve.Application:
    """The application for one worker group, on the node of its first rank. `node_ids` maps node names to
    Ray's ids."""
    deployment = serve.deployment(EngineReplica).options(
        name=ENGINE,
        num_replicas=1,
        max_ongoing_requests=config.max_ongoing_requests,
        max_constructor_retry_count=START_ATTEMPTS,
        health_check_period_s=2,
        health_check_timeout_s=30,
        graceful_shutdown_timeout_s=20,
        logging_config=LoggingConfig(enable_access_log=False),  # the gateway logs and counts requests
        ray_actor_options=_actor_options(config, node_ids.get(config.ranks[0].node)),
        user_config={INSTALLATION: config.installation},  # Serve reports it for each engine
    )
    metrics = (settings.metrics_host, settings.metrics_port_range)
    return deployment.bind(config, *metrics, settings.worker_host, dict(node_ids))


def _actor_options(config: EngineConfig, node_id: str | None) -> dict[str, Any]:
    """Actor options without GPUs: the plan assigns GPUs, and each node's agent reserves them in Ray.

    (Ray leaves CUDA_VISIBLE_DEVICES alone for an actor without GPUs; the group's launch sets it.)
    """
    options = {"num_cpus": 0, "num_gpus": 0}
    return options | ({"label_selector": {NODE_LABEL: node_id}} if node_id else {})
