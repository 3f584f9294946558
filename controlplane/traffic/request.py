"""One inference request as the queue and the router see it. Pure."""

from __future__ import annotations

from typing import NamedTuple

from controlplane.state.terms import LatePolicy
from controlplane.traffic.request_terms import NO_TERMS, RequestTerms


class InferenceRequest(NamedTuple):
    """`variant` is the variant's uid, 0 for the base; `arrived_s` is the gateway's monotonic time.

    A request that is not `counted` is one of our probes, and no demand. A request that does not `stream`
    shows no first token before its last token.
    """

    terms: RequestTerms = NO_TERMS
    variant: int = 0
    arrived_s: float = 0.0
    streams: bool = False
    counted: bool = True

    @property
    def first_by_s(self) -> float | None:
        """The request is dropped if it has no first token by this time. None: never."""
        after_s = self.terms.dropped_after_s
        return None if after_s is None else self.arrived_s + after_s

    @property
    def whole_by_s(self) -> float | None:
        """The request is dropped if it has not ended by this time. None: never."""
        terms = self.terms
        if terms.late is LatePolicy.FINISH or terms.deadline_s is None:
            return None
        return self.arrived_s + terms.deadline_s
