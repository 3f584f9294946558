"""Asks again for Serve's news of replicas when a call for them fails or its answer is lost.

Routers learn of new replicas by calls to Serve's controller, which answers when something changes or after a
while. Ray 2.60 stops asking when such a call ends with any error of the actor, even one that only reports a
network failure. It also waits for ever for a lost answer. HAProxy, a gateway or the controller then keeps an
old list of replicas until it ends. We found this by cutting nodes off for 20 s (`benchmarks.hardening`,
`cut`).
"""

from __future__ import annotations

import logging
import time
from typing import Any

from profiler.patches.target import Moved, Target

log = logging.getLogger(__name__)

POLL = Target("ray.serve._private.long_poll", "LongPollClient._poll_next", read={"2.60": "27b287f45148"})
TESTED = "2.60."
# Serve's controller answers within these limits in seconds, with or without news (`local.ray_switches`).
ANSWERS_S = (5, 10)
SILENT_S = 5.0  # more than ANSWERS_S; doubled after each call without an answer
MOST_SILENT_S = 60.0
MOST_IN_VAIN = 10  # the count's maximum: a power of two must stay a number
RETRY_S = 1.0
REMIND_S = 60.0


def keep_asking() -> None:
    """Keep asking, in all of this process, from now on. Only a client's newest call counts, so there is at
    most one chain of calls. Raises Moved."""
    import ray
    from ray.exceptions import ActorDiedError, RayTaskError

    if not ray.__version__.startswith(TESTED):
        raise Moved(f"gateways may miss new replicas: expected Ray {TESTED}*, got {ray.__version__}")

    def ask(client: Any, in_vain: int = 0) -> None:
        """Call Serve's controller. Runs in the client's event loop."""
        if not client.is_running:
            return
        number = client._asked = getattr(client, "_asked", 0) + 1
        if (timer := getattr(client, "_timer", None)) is not None:
            timer.cancel()
        silent_s = _answers_s() + min(MOST_SILENT_S, SILENT_S * 2**in_vain)
        client._timer = client.event_loop.call_later(silent_s, ask_again, client, number, in_vain)
        client._callbacks_processed_count = 0
        try:
            client._current_ref = client.host_actor.listen_for_change.remote(client.snapshot_ids)
            client._current_ref._on_completed(lambda news: answered(client, number, news))
        except Exception as e:
            _tell("cannot be asked (%r)", e)
            later(client, number)

    def answered(client: Any, number: int, news: Any) -> None:
        """Handle an answer. Runs in one of Ray's threads."""
        if client._asked != number:
            return
        is_known = not isinstance(news, BaseException) or isinstance(news, ActorDiedError | RayTaskError)
        try:
            if is_known:
                client._process_update(news)
                return
            _tell("cannot be reached (%r)", news)
        except Exception as e:
            _tell("gave an unknown answer (%r)", e)
        client._schedule_to_event_loop(lambda: later(client, number))

    def later(client: Any, number: int) -> None:
        client.event_loop.call_later(RETRY_S, ask_once, client, number)

    def ask_once(client: Any, number: int) -> None:
        if client._asked == number:
            ask(client)

    def ask_again(client: Any, number: int, in_vain: int) -> None:
        if client._asked == number and client.is_running:
            _tell("did not answer for %.0f s", _answers_s())
            ask(client, min(in_vain + 1, MOST_IN_VAIN))

    POLL.replace_once(lambda _: ask)


def _answers_s() -> float:
    """The time within which Serve's controller answers, as Serve's own client knows it."""
    from ray.serve._private import long_poll

    return float(long_poll.LISTEN_FOR_CHANGE_REQUEST_TIMEOUT_S[1])


_told: list[float] = []  # time of the last warning


def _tell(what: str, *details: Any) -> None:
    """Log the problem at once, and again every REMIND_S while it lasts."""
    now_s = time.monotonic()
    if not _told or now_s - _told[0] >= REMIND_S:
        _told[:] = [now_s]
        log.warning("Serve's controller " + what + " about replicas; the gateway asks again", *details)
