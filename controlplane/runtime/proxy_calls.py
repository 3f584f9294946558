"""A gateway fetches a request's body from the proxy that passed it on, by calls to an actor by name. They
find whoever has it now.

Ray remembers which actor had a name until it is told that it died. Once it was not told: a node had been cut
off for 20 s, its proxy was replaced, and for eight minutes its gateway asked the dead one for each body. So a
call that fails asks Ray's records about that actor, and where it is dead, for the name's new one.
"""

from __future__ import annotations

import asyncio
import logging
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from controlplane import errors

log = logging.getLogger(__name__)

ATTRIBUTE = "receive_asgi_messages"


def follow_proxies() -> None:
    """For all of this process, from now on."""
    from ray.serve._private.common import StreamingHTTPRequest

    if not isinstance(StreamingHTTPRequest.__dict__.get(ATTRIBUTE), property):
        log.warning("a proxy that was replaced may not be found: Ray has another way to fetch bodies")
        return
    StreamingHTTPRequest.receive_asgi_messages = property(_calls_of)


def _calls_of(request: Any) -> Any:
    """In place of a property of Serve's."""
    if request._receive_asgi_messages is None:
        request._receive_asgi_messages = ProxyCalls(request._proxy_actor_name)
    return request._receive_asgi_messages


class ProxyCalls:
    """Calls of one request. `name`: of the proxy's actor. Raises ValueError where nobody has it."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._proxy = _by_name(name)

    async def __call__(self, request: Any) -> bytes:
        """The next messages of `request`, pickled. Raises `errors.Unavailable` where the proxy is away."""
        from ray.exceptions import RayActorError

        try:
            return await self._ask(request)
        except RayActorError as e:
            looked_for = asyncio.get_running_loop().run_in_executor(
                _looking, _successor, self._name, self._proxy
            )
            found = await looked_for
            if found is None:
                raise _away(e) from e
        self._proxy = found
        try:
            return await self._ask(request)
        except RayActorError as e:
            raise _away(e) from e

    async def _ask(self, request: Any) -> bytes:
        messages: bytes = await self._proxy.receive_asgi_messages.remote(request)
        return messages


def _away(why: Exception) -> errors.Unavailable:
    log.warning("a proxy that passed a request on cannot be reached: %r", why)
    return errors.Unavailable("the proxy that passed this request on is away; try again", retry_after_s=1)


# All requests of a proxy that died look for its successor: one after another, and in a thread of their own,
# for Ray's records may be away, and the threads that others share must not wait for them.
_looking = ThreadPoolExecutor(1, "proxies")


def _successor(name: str, known: Any) -> Any | None:
    """Who has the name in place of `known`; None where that is not known to be dead, or has no successor."""
    from ray.exceptions import RayError

    try:
        found = _by_name(name)
        if found._actor_id == known._actor_id and _is_dead(known):
            _forget(known)
            found = _by_name(name)
            log.warning("proxy %s was replaced, and this process was not told", name)
    except (ValueError, RayError) as e:
        log.warning("proxy %s cannot be looked for: %r", name, e)
        return None
    return None if found._actor_id == known._actor_id else found


def _is_dead(actor: Any) -> bool:
    """By Ray's records, not by what this process was told."""
    from ray._private.state import state

    return bool(state.actor_table(actor._actor_id.hex()).get("State") == "DEAD")


def _forget(actor: Any) -> None:
    """A dead one: its name is then looked up anew."""
    import ray

    ray.kill(actor)


def _by_name(name: str) -> Any:
    import ray
    from ray.serve._private.constants import SERVE_NAMESPACE

    return ray.get_actor(name, namespace=SERVE_NAMESPACE)
