"""Which gateway Serve's proxy sends a request to: one whose connection answers, while there is any.

Serve's own choice looks at queues that it knows for ten seconds, prefers gateways of its own node, and asks
one that hangs again for each request. What pings say of the connections is known at once
(`controlplane.runtime.gateway_pings`).
"""

from __future__ import annotations

import asyncio
from typing import Any

from ray.serve._private.request_router import PowerOfTwoChoicesRequestRouter

# Serve tries at once again when a connection fails.
PAUSE_S = 0.05


class AnsweringGateways(PowerOfTwoChoicesRequestRouter):  # type: ignore[misc]  # Ray has no types
    """Serve's power of two choices, among those that answer. While none does, among all, slowly."""

    def apply_locality_routing(self, pending_request: Any = None) -> Any:
        near = super().apply_locality_routing(pending_request)
        for ids in (near, self._replica_id_set):
            if answering := {one for one in ids if self._may_answer(one)}:
                return answering
        return self._replica_id_set

    async def choose_replicas(self, candidate_replicas: Any, pending_request: Any = None) -> Any:
        chosen = await super().choose_replicas(candidate_replicas, pending_request)
        if any(group and not any(map(may_answer, group)) for group in chosen):
            await asyncio.sleep(PAUSE_S)
            chosen = await super().choose_replicas(candidate_replicas, pending_request)
        return chosen

    def _may_answer(self, replica_id: Any) -> bool:
        replica = self._replicas.get(replica_id)
        return replica is not None and may_answer(replica)


def may_answer(replica: Any) -> bool:
    """Whether nothing speaks against it: there is a connection to this replica, or none was tried yet. One
    that broke off is tried again meanwhile."""
    channel = getattr(replica, "_channel", None)
    return channel is None or channel.get_state(try_to_connect=True).name == "READY"
