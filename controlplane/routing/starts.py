"""How a request that starts delays the steps of others. Compiled.

Between two steps in which all rows decode, prompts are filled. With n rows that each generate L tokens, one
every `tpot`, n / (L tpot) requests start each second (Little's law). Each makes one step longer, by p
seconds. So `tpot = step + n p / L`: every row adds 1 / L starts for every token of the others. With more than
one start per token, every step fills prompts, and several prompts share a step: then `tpot` is the time of
such a step.
"""

from __future__ import annotations

import math

from controlplane.routing.snapshot import Snapshot
from profiler.compiled import Records, compiled
from profiler.step_time.steps import decode_curve_s, prefill_curve_s

# The variance relative to a Poisson process: the lengths of prompts and outputs vary, too.
CHANCE = 6.0


@compiled
def context_of(request: Records) -> float:
    """The tokens that a request has cached on average while it decodes."""
    return request.prompt + request.output / 2  # type: ignore[no-any-return]


@compiled
def starts_s(model: Records, rows: int, starts: float, tokens: float, added_s: float) -> float:
    """What requests that start add to the TPOT of others: for `starts` (per token), with `tokens` of prompts
    (per token) together, while `rows` decode."""
    if starts <= 0.0:
        return 0.0
    steps = min(1.0, starts)  # the share of a token's steps that fill prompts
    longer_s = prefill_curve_s(model, tokens / steps + rows) - decode_curve_s(model, rows)
    return steps * max(0.0, longer_s) + added_s


@compiled
def spread_s(model: Records, rows: int, starts: float, tokens: float, output: float) -> float:
    """The standard deviation of the TPOT of a row that makes `output` tokens: chance decides which prompts
    are filled meanwhile, and with fewer tokens each prompt weighs more."""
    if starts <= 0.0:
        return 0.0
    each_s = prefill_curve_s(model, tokens / starts + rows) - decode_curve_s(model, rows)
    return max(0.0, each_s) * math.sqrt(CHANCE * starts / max(1.0, output))


@compiled
def prompt_s(snapshot: Snapshot, g: int, request: Records) -> float:
    """What the request's variant adds to its prefill."""
    variant = snapshot.variants[snapshot.groups[g].model, request.variant]
    return request.prompt * variant.token_s  # type: ignore[no-any-return]
