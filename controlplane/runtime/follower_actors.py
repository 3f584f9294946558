"""The members of a group on other nodes than its engine's: one Ray actor each, which keeps a process there.

An actor ends when its replica ends, for any reason (Ray's rule for actors without a name). Its process ends
with the actor, and vLLM's ranks end with that process.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from workers.bus.sockets import with_token
from workers.clean_environment import forget_secrets
from workers.group.follower import Order
from workers.group.following import Following
from workers.group.members import Member, Rendezvous, members_of
from workers.messages import EngineConfig

STOP_S = 10.0


class FollowerActor:
    """A follower as a Ray actor."""

    def __init__(self, config: EngineConfig, number: int, rendezvous: Rendezvous) -> None:
        forget_secrets()
        self._following = Following(Order(config, number, rendezvous, ray.util.get_node_ip_address()))

    def wait(self) -> str:
        """The reason why the follower ended. Blocks until it ends."""
        return self._following.wait()

    def close(self) -> None:
        self._following.close()


class OtherMembers:
    """The members of a group except the first, which runs here. `node_ids` maps the plan's node names to
    Ray's ids."""

    def __init__(self, config: EngineConfig, node_ids: Mapping[str, str], host_ip: str) -> None:
        self._config = config
        self._node_ids = node_ids
        self._members = members_of(config)[1:]
        self._actors: list[Any] = []
        self.rendezvous = rendezvous_at(host_ip) if self._members else None

    def start(self, lost: Callable[[str], None]) -> None:
        """Start the members. A thread calls `lost` with the reason when the first of them ends."""
        if self.rendezvous is None:
            return
        self._actors = [self._start(member, self.rendezvous) for member in self._members]
        threading.Thread(target=self._watch, args=(lost,), name="group-members", daemon=True).start()

    def _start(self, member: Member, rendezvous: Rendezvous) -> Any:
        """Start one member. Ray assigns no GPU: the plan does, as for the engine's replica."""
        where = NodeAffinitySchedulingStrategy(node_id=self._node_ids[member.node], soft=False)
        options = {"num_cpus": 0, "num_gpus": 0, "max_concurrency": 2, "scheduling_strategy": where}
        actor = ray.remote(FollowerActor).options(**options)
        return actor.remote(self._config, member.number, rendezvous)

    def _watch(self, lost: Callable[[str], None]) -> None:
        pairs = zip(self._actors, self._members, strict=True)
        waiting = {actor.wait.remote(): member for actor, member in pairs}
        (ended, *_), _ = ray.wait(list(waiting), num_returns=1)
        try:
            reason = ray.get(ended)
        except RayError as e:
            reason = f"their actor ended: {str(e).splitlines()[0]}"
        lost(f"the ranks on node {waiting[ended].node} are lost: {reason}")

    def stop(self) -> None:
        """End the members and wait at most STOP_S. Blocking."""
        actors, self._actors = self._actors, []
        if not actors:
            return
        ray.wait([actor.close.remote() for actor in actors], num_returns=len(actors), timeout=STOP_S)
        for actor in actors:
            ray.kill(actor)


def rendezvous_at(host_ip: str) -> Rendezvous:
    """A rendezvous with two ports that are free now, and the token that the bus requires."""
    with ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(2)]
        for each in sockets:
            each.bind((host_ip, 0))
        port, bus = (int(each.getsockname()[1]) for each in sockets)
    return Rendezvous(host_ip, port, with_token(f"tcp://{host_ip}:{bus}"))
