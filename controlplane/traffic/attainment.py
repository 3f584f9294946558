"""Whether a request's targets were kept. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from controlplane import errors
from controlplane.traffic.request_terms import RequestTerms

OK = "ok"
# Errors that are not the client's fault: a request with such an error missed its targets.
_MISSED = frozenset(
    error.code
    for error in (
        errors.OstinatoError,
        errors.Overloaded,
        errors.Late,
        errors.EngineFailed,
        errors.Unavailable,
        errors.TimedOut,
        errors.Cut,
    )
)


class Outcome(NamedTuple):
    """The end of a request. `code` is "ok", or an error's code. The first of `chunks` came `first_s` after
    the request's arrival (None: none came), and the request ended after `took_s`. An answer that is not
    streamed has no chunks."""

    code: str
    streams: bool
    first_s: float | None
    took_s: float
    chunks: int


def attained(terms: RequestTerms, seen: Outcome) -> Iterator[tuple[str, bool]]:
    """(target, kept) of each target that can be judged.

    Requests whose client left, or that were wrong, are not judged. TTFT and TPOT of answers that are not
    streamed are unknown. Every chunk of a stream counts as a token, except the last, which marks the end.
    """
    failed = seen.code in _MISSED
    if seen.code != OK and not failed:
        return
    if terms.ttft_s is not None and seen.streams:
        yield "ttft", seen.first_s is not None and seen.first_s <= terms.ttft_s
    if terms.tpot_s is not None and not failed and seen.first_s is not None and seen.chunks > 2:
        yield "tpot", (seen.took_s - seen.first_s) / (seen.chunks - 2) <= terms.tpot_s
    if terms.deadline_s is not None:
        yield "deadline", not failed and seen.took_s <= terms.deadline_s
