"""The route of the cluster: nodes, devices, and who holds what."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter

from controlplane.api.services import Services
from controlplane.cluster.memory_usage import memory_by_node
from controlplane.management.schemas.cluster import ClusterView, NodeView


def router(services: Services) -> APIRouter:
    routes = APIRouter(tags=["cluster"])

    @routes.get("/cluster")
    async def describe_cluster() -> ClusterView:
        """Nodes and devices as last reported: memory used, promised and free, load, who holds what."""
        state, nodes = await asyncio.gather(services.read(), services.cluster.nodes())
        held = memory_by_node(nodes, state.ledgers, services.settings.headroom)
        return ClusterView(nodes=[NodeView.of(node) for node in held])

    return routes
