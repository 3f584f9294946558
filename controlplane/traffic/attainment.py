"""Whether a request's targets were kept. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from controlplane import errors
from controlplane.traffic.request_terms import RequestTerms

OK = "ok"
# Of the errors, those that are not the client's: with one of them a target was not kept.
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
    """`code` is "ok", or an error's; the first of `chunks` came `first_s` after the request (None: none was
    seen), and it ended after `took_s`. A whole answer has no chunks."""

    code: str
    streams: bool
    first_s: float | None
    took_s: float
    chunks: int


def attained(terms: RequestTerms, seen: Outcome) -> Iterator[tuple[str, bool]]:
    """(target, kept) of each target that can be judged.

    A client that left, or whose request was wrong, says nothing. TTFT and TPOT of whole answers are not seen.
    Every chunk of a stream counts as a token, but for the last one, which says that it ends.
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
