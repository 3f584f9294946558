"""The size of an engine's KV cache, its context, and how many requests it runs at once. Pure.

One number is chosen: the tokens that the KV cache holds. The context is the model's, or as much of it as the
cache holds. As many requests run at once as the cache holds at their usual length. An engine has the usual
size if it fits. It is smaller if memory is short, and larger as far as the intent allows: the estimated
objective may grow by `MAY_GROW`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from placement.solver.request import Request
from placement.types import Intent, Placement

REQUEST_TOKENS = 2048  # of a request without expected lengths
USUAL_REQUESTS = 16  # at once
BUSY = 2.0  # an engine can run this many times the requests that the expected rate keeps in flight
MEMORY = "as memory allows"
# Relative to the engine of usual size. The cache's size does not change times, but memory.
MAY_GROW = {
    Intent.MIN_LATENCY: 0.01,
    Intent.MIN_GPU_HOURS: 0.01,
    Intent.MIN_COST: 0.25,
    Intent.MIN_MEMORY: 0.0,
}

Search = Callable[[Request], Placement | None]
TokenTime = Callable[[Placement, int], float]


@dataclass(frozen=True)
class Bound:
    """At most `most`, with the reason; `fixed`: no other value is allowed."""

    most: int
    why: str
    fixed: bool = False


@dataclass(frozen=True)
class SizeRange:
    """The sizes that may be chosen. Each request is assumed to need `request_tokens` of the KV cache. The
    context has at least `min_context` tokens. Without `grows` no size above the usual one is tried."""

    context: Bound
    requests: Bound
    request_tokens: int
    min_context: int = 1
    usual_requests: int = USUAL_REQUESTS
    grows: bool = True

    def context_of(self, cache_tokens: int) -> int:
        return self.context.most if self.context.fixed else min(self.context.most, cache_tokens)

    def requests_of(self, cache_tokens: int) -> int:
        fit = max(1, cache_tokens // self.request_tokens)
        return self.requests.most if self.requests.fixed else min(self.requests.most, fit)

    @property
    def min_tokens(self) -> int:
        context = self.context.most if self.context.fixed else min(self.min_context, self.context.most)
        return max(context, (self.requests.most if self.requests.fixed else 1) * self.request_tokens)

    @property
    def usual_tokens(self) -> int:
        requests = min(self.requests.most, self.usual_requests)
        each = max(self.request_tokens, min(REQUEST_TOKENS, self.context.most))
        if self.requests.fixed:
            requests, each = self.requests.most, self.request_tokens
        return max(self.min_tokens, requests * each)

    @property
    def max_tokens(self) -> int:
        if not self.grows:
            return self.usual_tokens
        return max(self.usual_tokens, self.context.most, self.requests.most * self.request_tokens)

    @property
    def caches(self) -> tuple[int, ...]:
        """Tokens of the caches that are tried, ascending: room for 1, 2, 3, 4, 6, 8, 12, ... requests."""
        low, high, each = self.min_tokens, self.max_tokens, self.request_tokens
        powers = range(math.ceil(math.log2(max(2, high / each))) + 1)
        counts = {count for power in powers for count in (2**power, 3 * 2**power // 2)}
        steps = {count * each for count in counts} | {self.usual_tokens, self.context.most, high, low}
        return tuple(sorted(step for step in steps if low <= step <= high))


def sized_request(request: Request, sizes: SizeRange, cache_tokens: int) -> Request:
    """The request for an engine with a KV cache of this size."""
    return replace(
        request,
        context=sizes.context_of(cache_tokens),
        concurrency=sizes.requests_of(cache_tokens),
        sequence_tokens=sizes.request_tokens,
    )


def usual_request(request: Request, sizes: SizeRange) -> Request:
    return sized_request(request, sizes, sizes.usual_tokens)


def smallest_request(request: Request, sizes: SizeRange) -> Request:
    return sized_request(request, sizes, sizes.min_tokens)


def choose(
    request: Request, sizes: SizeRange, usual: Search, search: Search, token_s: TokenTime | None = None
) -> Placement | None:
    """The placement of the largest engine that the intent allows; None if not even the smallest one fits.

    `usual` finds the placement of the usual size, `search` the placement of other sizes. `token_s` predicts
    the time of a token while a number of requests runs.
    """
    placement = usual(usual_request(request, sizes))
    if placement is None:
        return _more_requests(request, sizes, usual) or _smaller(request, sizes, search)
    fewer = _within_tpot(request, sizes, placement, token_s)
    if fewer != sizes:
        sizes, placement = fewer, usual(usual_request(request, fewer)) or placement
    expected = math.ceil(BUSY * request.rate_per_s * placement.choice.latency_s)
    if expected > sizes.requests_of(sizes.usual_tokens):
        busier = replace(sizes, usual_requests=expected)
        if (more := search(usual_request(request, busier))) is not None:
            sizes, placement = busier, more
    return _larger(request, sizes, placement, search)


def _within_tpot(
    request: Request, sizes: SizeRange, placement: Placement, token_s: TokenTime | None
) -> SizeRange:
    """The sizes with at most as many requests as keep the TPOT limit while all of them run."""
    limit, most = request.slos.tpot_s, sizes.requests.most
    if limit is None or token_s is None or sizes.requests.fixed or token_s(placement, most) <= limit:
        return sizes
    low, high = 1, most
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if token_s(placement, middle) <= limit else (low, middle)
    return replace(sizes, requests=Bound(low, "as SLOs.tpot_ms allows"))


def _more_requests(request: Request, sizes: SizeRange, usual: Search) -> Placement | None:
    """The smallest engine that sustains an expected rate that is too high for the usual engine."""
    count = 2 * sizes.usual_requests
    while (
        request.rate_per_s > 0 and sizes.grows and not sizes.requests.fixed and count <= sizes.requests.most
    ):
        busier = replace(sizes, usual_requests=count)
        if (placement := usual(usual_request(request, busier))) is not None:
            return told(placement, busier, "for the expected rate")
        count *= 2
    return None


def _smaller(request: Request, sizes: SizeRange, search: Search) -> Placement | None:
    caches = [tokens for tokens in sizes.caches if tokens < sizes.usual_tokens]
    found = _largest(request, sizes, caches, search, lambda placement: True)
    if found is None:
        return None
    reduced = told(found, sizes, MEMORY)
    return replace(reduced, choice=replace(reduced.choice, reduced=True))


def _larger(request: Request, sizes: SizeRange, usual: Placement, search: Search) -> Placement:
    most = usual.choice.objective * (1 + MAY_GROW[request.intent])
    caches = [tokens for tokens in sizes.caches if tokens > sizes.usual_tokens]
    too_dear = False

    def allowed(placement: Placement) -> bool:
        nonlocal too_dear
        within = placement.choice.objective <= most
        too_dear = too_dear or not within
        return within

    found = _largest(request, sizes, caches, search, allowed)
    limit = f"as {request.intent} allows" if too_dear or request.intent is Intent.MIN_MEMORY else MEMORY
    return told(found or usual, sizes, limit if sizes.grows else "usual")


def _largest(
    request: Request,
    sizes: SizeRange,
    caches: list[int],
    search: Search,
    allowed: Callable[[Placement], bool],
) -> Placement | None:
    """The largest allowed size, by halving: what fits with a large cache fits with a smaller one."""
    best, low, high = None, 0, len(caches)
    while low < high:
        middle = (low + high) // 2
        placement = search(sized_request(request, sizes, caches[middle]))
        if placement is not None and allowed(placement):
            best, low = placement, middle + 1
        else:
            high = middle
    return best


def told(placement: Placement, sizes: SizeRange, limit: str) -> Placement:
    """The placement with a sentence about its size. `limit`: the reason why it is not larger."""
    context, requests = placement.plan.max_model_len, placement.plan.sequences
    of_context = sizes.context.why if context == sizes.context.most else limit
    of_requests = sizes.requests.why if requests == sizes.requests.most else limit
    said = f"context {context:,} ({of_context}), {requests} requests at once ({of_requests})"
    return replace(placement, choice=replace(placement.choice, sizes=said))
