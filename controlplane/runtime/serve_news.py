"""Serve's news of replicas, asked for again when a call for them fails or its answer is lost.

Whoever routes learns of new replicas by calls to Serve's controller that it answers when something changes,
or after a while. Ray 2.60 asks no more once such a call ends with any error of the actor's, also one that
only says that the network is away; and it waits for ever for an answer that was lost. Then a proxy or a
gateway knows the replicas of that day until it ends: found by cutting nodes off for 20 s
(`benchmarks.hardening`, `cut`).
"""

from __future__ import annotations

import logging
from typing import Any

log = logging.getLogger(__name__)

TESTED = "2.60."
# Serve's controller answers within so many seconds, news or not (`local.ray_switches`).
ANSWERS_S = (5, 10)
SILENT_S = 15.0
RETRY_S = 1.0


def keep_asking() -> None:
    """For all of this process, from now on."""
    import ray
    from ray.exceptions import ActorUnavailableError
    from ray.serve._private.long_poll import LongPollClient

    if not ray.__version__.startswith(TESTED):
        log.warning("news of replicas may end: expected Ray %s, got %s", TESTED, ray.__version__)
        return
    process = LongPollClient._process_update

    def ask(client: Any) -> None:
        if not client.is_running:
            return
        client._callbacks_processed_count = 0
        ref = client._current_ref = client.host_actor.listen_for_change.remote(client.snapshot_ids)
        ref._on_completed(lambda news: answered(client, ref, news))
        client.event_loop.call_later(SILENT_S, ask_again, client, ref)

    def answered(client: Any, ref: Any, news: Any) -> None:
        """In a thread of Ray's. Nobody waits any more for what was asked for again."""
        if client._current_ref is not ref:
            return
        client._current_ref = None
        if isinstance(news, ActorUnavailableError):
            log.warning("Serve's controller cannot be reached for news of replicas; asking again")
            client._schedule_to_event_loop(lambda: client.event_loop.call_later(RETRY_S, client._poll_next))
        else:
            process(client, news)

    def ask_again(client: Any, ref: Any) -> None:
        if client._current_ref is ref:
            log.warning("Serve's controller said nothing of replicas for %.0f s; asking again", SILENT_S)
            client._poll_next()

    LongPollClient._poll_next = ask
