"""Measure the request path, once an engine serves."""

from __future__ import annotations

import asyncio
import logging
import time

from controlplane import errors
from controlplane.cluster.inventory import inventory_of
from controlplane.controller.interfaces import PathProber
from controlplane.planning import path_measuring
from controlplane.profiling import request_paths
from controlplane.settings import Settings
from controlplane.state.records import Deployment, PathProfile
from controlplane.state.repository import Put, Repository, State
from controlplane.state.transactions import Superseded, persist
from profiler.request_path import fit

log = logging.getLogger(__name__)

LIMIT_S = 120.0


class PathAction:
    def __init__(self, settings: Settings, repository: Repository, cluster: PathProber) -> None:
        self._settings = settings
        self._repository = repository
        self._cluster = cluster

    async def measure(self, base: str) -> None:
        """Measure through an engine of `base`, and record the result. A failure is recorded with its
        reason and the time of the next attempt."""
        devices = inventory_of(await self._cluster.nodes(wait=False)).devices
        key = request_paths.path_key(self._settings, devices)
        state = await self._repository.read_async()
        if base not in state.deployments or not path_measuring.is_due(state, key, time.time()):
            raise Superseded(base)
        versioned = state.paths.get(key)
        known = versioned.record if versioned else None
        deployment = state.deployments[base].record
        max_tokens = path_measuring.longest_prompt(deployment)
        try:
            async with asyncio.timeout(LIMIT_S):
                path = fit(await self._cluster.probe_path(base, deployment.serving_ids(), max_tokens))
            await self._require_same(deployment)
        except Exception as e:
            log.warning("the request path could not be measured: %r", e)
            await self._keep(path_measuring.failed(key, known, str(e) or type(e).__name__, time.time()))
        else:
            log.info("the request path takes %.1f ms", 1e3 * path.alone_s)
            await self._keep(request_paths.measured(key, path, time.time()))

    async def _require_same(self, deployment: Deployment) -> None:
        """Errors: EngineFailed when other groups serve now, because requests may have gone to their
        engines."""
        now = (await self._repository.read_async()).deployments.get(deployment.model)
        if now is None or now.record.serving_ids() != deployment.serving_ids():
            raise errors.EngineFailed(
                f"engines of '{deployment.model}' started or stopped during the measurement"
            )

    async def _keep(self, record: PathProfile) -> None:
        def once() -> None:
            state: State = self._repository.read()
            known = state.paths.get(record.key)
            self._repository.commit([Put(record, known.version if known else 0)])

        await asyncio.to_thread(persist, once)
