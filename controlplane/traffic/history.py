"""What earlier requests of a base show about the next: lengths, and where prefixes are cached. Pure."""

from __future__ import annotations

from typing import NamedTuple

from controlplane.traffic.last_groups import LastGroups
from controlplane.traffic.member import Member, RoutedRequest
from controlplane.traffic.output_lengths import OutputLengths
from controlplane.traffic.request import InferenceRequest

_BEGINNING_TOKENS = 1024.0  # of a prompt; requests with the same beginning are assumed to share these
_ANY_VARIANT = -1


class Home(NamedTuple):
    """The slot of the worker whose KV cache may hold the first `cached` tokens of the prompt; -1: none."""

    slot: int = -1
    cached: float = 0.0


class TrafficHistory:
    """Means and last workers of one base's requests, in one gateway."""

    def __init__(self) -> None:
        self._lengths = OutputLengths()
        self._last: LastGroups[Member] = LastGroups()
        self.mean_prompt = 64.0  # tokens

    def expected_output(self, request: InferenceRequest) -> float:
        """Expected tokens of the answer, 1 or more."""
        return self._lengths.expected(request.variant, request.terms.output_limit)

    @property
    def mean_output(self) -> float:
        """Mean tokens of an answer, over all variants."""
        return self._lengths.expected(_ANY_VARIANT, 0)

    def home(self, request: InferenceRequest) -> Home:
        """The worker of the session's last request, or of the last request with the same beginning."""
        terms, last = request.terms, None
        if terms.session:
            last = self._last.find((request.variant, terms.session))
        if last is None and (terms.session or terms.beginning):
            last = self._last.find(terms.beginning)
        if last is None or last.group.slot < 0:
            return Home()
        return Home(last.group.slot, min(last.tokens, float(terms.prompt_tokens)))

    def sent(self, routed: RoutedRequest) -> None:
        terms, row = routed.request.terms, routed.row
        if terms.session:
            self._last.note((routed.request.variant, terms.session), routed.member, row.prompt + row.output)
        if terms.beginning:
            self._last.note(terms.beginning, routed.member, min(row.prompt, _BEGINNING_TOKENS))
        self.mean_prompt += (terms.prompt_tokens - self.mean_prompt) / 32

    def ended(self, request: InferenceRequest, tokens: int) -> None:
        """The request's answers have `tokens` tokens together."""
        self._lengths.observe(request.variant, tokens // request.terms.sequences)
