"""The gateway's copy of the route table, kept current with the records."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

from controlplane import errors
from controlplane.gateway.operation_watch import OperationWatch
from controlplane.state.repository import Repository, State
from controlplane.traffic.route_table import Route, RouteTable, build_table
from controlplane.traffic.tenants import DEFAULT, Tenant

REFRESH_S = 0.1
# The parts of a state that `build_table` uses.
_OF_ROUTES = ("models", "deployments", "undecodable")


class RouteBook:
    """The newest route table, refreshed in the background and, for an unknown name, on demand.

    `operations` sees every state that it reads.
    """

    def __init__(self, repository: Repository) -> None:
        self._repository = repository
        self.operations = OperationWatch()
        self._table = RouteTable(-1, {}, {}, {})
        self._state: State | None = None

    @property
    def state(self) -> State | None:
        """The records that the table was made from; None before the first."""
        return self._state

    @property
    def table(self) -> RouteTable:
        return self._table

    async def refresh(self) -> RouteTable:
        state = await self._repository.read_async()
        if self._state is not None and state.revision < self._state.revision:
            state = await self._repository.read_async()  # another was faster, or the store lost data
        if state is not self._state:
            self.operations.look(state)
            self._table, self._state = self._made_of(state), state
        return self._table

    def _made_of(self, state: State) -> RouteTable:
        """The table of a state. Most commits change operations only: the same record objects give the same
        table."""
        last = self._state
        if last is not None and all(getattr(last, name) is getattr(state, name) for name in _OF_ROUTES):
            return replace(self._table, revision=state.revision)
        return build_table(state, self._table)

    async def some(self) -> RouteTable:
        """The current table, which may lag a little. Errors: Unavailable, if there is none yet."""
        return self._table if self._state is not None else await self.refresh()

    async def newest(self) -> RouteTable:
        """The newest table; while the store is unreachable, the last one. Errors: Unavailable, without
        one."""
        try:
            return await self.refresh()
        except errors.Unavailable:
            return await self.some()

    def known(self, name: str, tenant: Tenant = DEFAULT) -> Route | None:
        """As `resolve`, for a name that is served; None for any other."""
        return self._table.known(name, tenant)

    async def resolve(self, name: str, tenant: Tenant = DEFAULT) -> Route:
        """The route of a name. Errors: those of the table."""
        try:
            return self._table.resolve(name, tenant)
        except errors.OstinatoError:
            return (await self.refresh()).resolve(name, tenant)

    async def keep_fresh(self, on_error: Callable[[Exception], None]) -> None:
        while True:
            try:
                await self.refresh()
            except Exception as e:  # the last table stays in force while the store is unreachable
                on_error(e)
            await asyncio.sleep(REFRESH_S)
