"""The demand for each class of ranks, as means that fade. Compiled."""

from __future__ import annotations

import math

from controlplane.routing.snapshot import Snapshot
from controlplane.routing.starts import context_of, prompt_s
from controlplane.routing.state import RouterState
from profiler.compiled import Records, compiled
from profiler.step_time.records import CLASSES

# A tick weighs as much as all earlier ticks that are younger than this.
MEMORY_S = 60.0
LONGEST_PROMISE_S = 1.0  # a request without a promised TPOT counts as one with this promise


@compiled
def count(snapshot: Snapshot, state: RouterState, request: Records) -> None:
    """Count a new request."""
    of_class = state.classes[snapshot.variants[0, request.variant].rank_class]
    of_class.recent_tokens += request.output
    of_class.recent_context += request.output * context_of(request)
    of_class.recent_starts += 1.0
    of_class.recent_prompts += request.prompt
    of_class.recent_start_s += prompt_s(snapshot, 0, request)
    of_class.recent_promise += request.output * min(request.tpot_s, LONGEST_PROMISE_S)


@compiled
def tick(state: RouterState, now_s: float) -> None:
    """Add the requests since the last tick to the rates."""
    clock = state.clock[0]
    elapsed_s = now_s - clock.last_s
    if elapsed_s <= 0.0:
        return
    # The first ticks average over the time so far, so that a start from nothing does not look like little
    # demand.
    kept = math.exp(-elapsed_s / min(MEMORY_S, max(now_s, elapsed_s)))
    if clock.ticks == 0:
        kept = 0.0
    fresh = (1.0 - kept) / elapsed_s
    for number in range(CLASSES):
        c = state.classes[number]
        c.rate_tokens = c.rate_tokens * kept + c.recent_tokens * fresh
        c.rate_context = c.rate_context * kept + c.recent_context * fresh
        c.rate_promise = c.rate_promise * kept + c.recent_promise * fresh
        c.rate_starts = c.rate_starts * kept + c.recent_starts * fresh
        c.rate_prompts = c.rate_prompts * kept + c.recent_prompts * fresh
        c.rate_start_s = c.rate_start_s * kept + c.recent_start_s * fresh
        c.recent_tokens = c.recent_context = c.recent_promise = 0.0
        c.recent_starts = c.recent_prompts = c.recent_start_s = 0.0
    clock.last_s = now_s
    clock.ticks += 1
