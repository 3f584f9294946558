"""What a request that starts means for the steps of others. Compiled.

Between two steps in which all rows decode, prompts are filled. With n rows that each make L tokens, one every
`tpot`, n / (L tpot) requests start each second (Little's law), and each makes one step longer, by p seconds.
So `tpot = step + n p / L`: every row adds 1 / L starts for every token of the others.
"""

from __future__ import annotations

from controlplane.routing.snapshot import Snapshot
from profiler.compiled import Records, compiled
from profiler.step_time.steps import decode_curve_s, prefill_curve_s


@compiled
def context_of(request: Records) -> float:
    """The tokens that a request has cached on average while it decodes."""
    return request.prompt + request.output / 2  # type: ignore[no-any-return]


@compiled
def starts_s(model: Records, rows: int, starts: float, tokens: float, added_s: float) -> float:
    """What requests that start add to the TPOT of others: for `starts` (a token), with `tokens` of prompts (a
    token) in all, beside `rows` that decode."""
    if starts <= 0.0:
        return 0.0
    longer_s = prefill_curve_s(model, tokens / starts + rows) - decode_curve_s(model, rows)
    return starts * max(0.0, longer_s) + added_s


@compiled
def prompt_s(snapshot: Snapshot, g: int, request: Records) -> float:
    """What the request's variant adds to its prefill."""
    variant = snapshot.variants[snapshot.groups[g].model, request.variant]
    return request.prompt * variant.token_s  # type: ignore[no-any-return]
