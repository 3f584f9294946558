"""Tests whether a group could run a request at once. Compiled."""

from __future__ import annotations

from controlplane.routing.snapshot import Snapshot
from profiler.compiled import Records, compiled


@compiled
def has_room(snapshot: Snapshot, g: int, request: Records) -> bool:
    """Tell whether a group has a free row, and KV cache for the request's prompt and expected output."""
    batch = snapshot.groups[g].batch
    model = snapshot.models[snapshot.groups[g].model]
    fits = batch.context + request.prompt + request.output <= model.kv_tokens
    return bool(batch.rows < model.max_rows and fits)


@compiled
def any_room(snapshot: Snapshot, request: Records) -> bool:
    """Tell whether any usable group has room."""
    for g in range(len(snapshot.groups)):
        if snapshot.groups[g].usable and has_room(snapshot, g, request):
            return True
    return False
