"""The time saved if the beginning of the prompt is already cached: the prefill of those tokens.

It is at most the request's own prefill. `REQUEST.home` names the group that had the last request of the same
session, or with the same beginning. It is not known what is still cached there, so this is a hint.
"""

from __future__ import annotations

from controlplane.routing.snapshot import Snapshot
from profiler.compiled import Records, compiled
from profiler.step_time.steps import prefill_curve_s


@compiled
def cached_prefix_s(snapshot: Snapshot, g: int, request: Records) -> float:
    """Seconds saved, 0 or more."""
    if request.home != g or not request.cached > 0.0 or not request.prompt > 0.0:
        return 0.0
    group = snapshot.groups[g]
    model = snapshot.models[group.model]
    if model.batched_tokens <= 0 or not model.prefill_grain > 0.0:
        return 0.0
    cached = min(request.cached, request.prompt)
    whole_s = prompts_s(model, request.prompt)
    saved_s = whole_s - prompts_s(model, request.prompt - cached)
    saved_s += cached * snapshot.variants[group.model, request.variant].token_s
    return group.correction * max(0.0, saved_s)  # type: ignore[no-any-return]


@compiled
def prompts_s(model: Records, tokens: float) -> float:
    """Time to fill `tokens` tokens, in as few steps as possible."""
    full = int(tokens / model.batched_tokens)
    rest = tokens - full * model.batched_tokens
    return full * prefill_curve_s(model, float(model.batched_tokens)) + prefill_curve_s(model, rest)
