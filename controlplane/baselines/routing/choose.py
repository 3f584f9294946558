"""Every policy by its name and number, and the function that runs any of them. Compiled."""

from __future__ import annotations

from controlplane.baselines.routing import (
    adapter_affinity,
    caraserve,
    load_state,
    most_idle,
    random_choice,
    rendezvous,
    serve_multiplex,
    shuffle_sharding,
    two_choices,
)
from controlplane.routing import least_harm
from controlplane.routing.snapshot import Snapshot
from controlplane.routing.state import RouterState
from profiler.compiled import Records, compiled

POLICIES = (
    "least-harm",
    "caraserve",
    "most-idle",
    "random",
    "two-choices",
    "serve-multiplex",
    "adapter-affinity",
    "load-state",
    "shuffle-sharding",
    "rendezvous",
)

_least_harm = least_harm.pick
_caraserve = caraserve.pick
_most_idle = most_idle.pick
_random_choice = random_choice.pick
_two_choices = two_choices.pick
_serve_multiplex = serve_multiplex.pick
_adapter_affinity = adapter_affinity.pick
_load_state = load_state.pick
_shuffle_sharding = shuffle_sharding.pick
_rendezvous = rendezvous.pick


@compiled
def choose(policy: int, snapshot: Snapshot, request: Records, state: RouterState) -> int:  # noqa: PLR0911
    """The index of the group for `request`, by the policy of that number in POLICIES; -1: no group."""
    if policy == 0:
        return _least_harm(snapshot, request, state)
    if policy == 1:
        return _caraserve(snapshot, request, state)
    if policy == 2:
        return _most_idle(snapshot, request, state)
    if policy == 3:
        return _random_choice(snapshot, request, state)
    if policy == 4:
        return _two_choices(snapshot, request, state)
    if policy == 5:
        return _serve_multiplex(snapshot, request, state)
    if policy == 6:
        return _adapter_affinity(snapshot, request, state)
    if policy == 7:
        return _load_state(snapshot, request, state)
    if policy == 8:
        return _shuffle_sharding(snapshot, request, state)
    if policy == 9:
        return _rendezvous(snapshot, request, state)
    return -1
