"""The services that the routes need: the state, the route table, the cluster and the settings."""

from __future__ import annotations

import secrets
import time
import uuid
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Protocol

from controlplane.api import hidden_paths
from controlplane.api.hidden_paths import Hide
from controlplane.api.request_bounds import Bounds
from controlplane.api.request_limits import RequestLimits
from controlplane.cluster.engine_status import EngineView
from controlplane.cluster.inventory import NodeState
from controlplane.gateway.audit import AuditLog
from controlplane.gateway.metrics import Metrics
from controlplane.gateway.rate_book import RateBook
from controlplane.gateway.route_book import RouteBook
from controlplane.gateway.tenants_book import TenantsBook
from controlplane.management.ownership import seen_by
from controlplane.settings import Settings
from controlplane.state.records import Asker
from controlplane.state.repository import Repository, State
from controlplane.state.transactions import Context
from controlplane.template_arguments import template_arguments_of
from controlplane.traffic.request_terms import RequestTerms
from controlplane.traffic.tenants import INSTALLATION, Caller
from placement.types import Inventory
from workers.messages import (
    EngineCall,
    EngineHead,
    EngineReply,
    EngineResidency,
    VariantRef,
)


class ClusterAccess(Protocol):
    """The cluster for the routes: its engines, by their base model, and its nodes.

    `controlplane.runtime.ray_cluster.RayCluster` implements it.
    """

    async def call(self, base: str, request: EngineCall, terms: RequestTerms) -> EngineReply: ...

    def stream(
        self, base: str, request: EngineCall, terms: RequestTerms
    ) -> AsyncGenerator[EngineHead | bytes, None]: ...

    async def observe(self) -> dict[str, EngineView]: ...

    async def residency(self, base: str) -> list[EngineResidency]:
        """The location of the variants in each of the base's replicas."""
        ...

    async def limit_variants(self, base: str, limit: int) -> None: ...

    async def prefetch(self, base: str, variant: VariantRef) -> None: ...

    async def logs(self, base: str, lines: int) -> str: ...

    async def metrics_targets(self) -> list[tuple[str, str]]:
        """(address, component) of every process that serves metrics."""
        ...

    async def nodes(self, wait: bool = True) -> tuple[NodeState, ...]:
        """All nodes as last reported; `wait`: wait a while for the reports of new nodes."""
        ...

    async def inventory(self) -> Inventory: ...


@dataclass(frozen=True)
class Services:
    settings: Settings
    repository: Repository
    routes: RouteBook
    cluster: ClusterAccess
    metrics: Metrics
    tenants: TenantsBook
    audit: AuditLog
    rates: RateBook = field(default_factory=RateBook)
    limits: RequestLimits = field(default_factory=RequestLimits)

    @cached_property
    def hide(self) -> Hide:
        """The function that removes file paths from errors of inference requests."""
        return hidden_paths.for_tenants(self.settings)

    @cached_property
    def request_bounds(self) -> Bounds:
        """The bounds of an inference request."""
        arguments = template_arguments_of(self.settings.template_arguments)
        return replace(self.limits.bounds, template_arguments=arguments)

    async def read(self) -> State:
        return await self.repository.read_async()

    async def read_for(self, caller: Caller) -> State:
        """The records that the caller may see."""
        return seen_by(caller.tenant, await self.read())


def fresh_context(caller: Caller = INSTALLATION) -> Context:
    """Ids, the time and the caller, for one command."""
    uids = tuple(secrets.randbelow(2**31 - 2) + 1 for _ in range(2))
    tenant = caller.tenant
    return Context(
        f"op-{uuid.uuid4().hex[:16]}",
        uids,
        time.time(),
        tenant.owner,
        Asker(tenant.name, tenant.role, caller.key),
        tenant.quota.max_host_bytes,
    )
