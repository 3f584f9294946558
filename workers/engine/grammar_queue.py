"""Decides which grammar is compiled next, so that no tenant holds every place. Pure."""

from __future__ import annotations

from collections import Counter

AT_ONCE = 3  # grammars that are compiled at the same time
OF_A_TENANT = AT_ONCE - 1  # of them, grammars of one tenant


class GrammarQueue:
    """The grammars that wait, in the order in which they came, and those that are being compiled.

    Requests of several tenants may wait for one grammar. The tenant with the fewest grammars under way is
    next.
    """

    def __init__(self) -> None:
        self._waiting: dict[bytes, Counter[str]] = {}
        self._tenants: dict[bytes, str] = {}  # of the grammars that are being compiled

    def join(self, grammar: bytes, tenant: str) -> None:
        """A request of the tenant waits for the grammar."""
        if grammar not in self._tenants:
            self._waiting.setdefault(grammar, Counter())[tenant] += 1

    def leave(self, grammar: bytes, tenant: str) -> bool:
        """The request waits no longer. True if no request waits for the grammar: it left the queue."""
        requests = self._waiting.get(grammar)
        if requests is None:
            return False
        requests -= Counter({tenant: 1})
        if not requests:
            del self._waiting[grammar]
        return not requests

    def begin(self) -> bytes | None:
        """The next grammar to compile; None while none may begin."""
        if len(self._tenants) >= AT_ONCE:
            return None
        running = Counter(self._tenants.values())
        charged = {
            grammar: min(requests, key=running.__getitem__) for grammar, requests in self._waiting.items()
        }
        allowed = [grammar for grammar, tenant in charged.items() if running[tenant] < OF_A_TENANT]
        if not allowed:
            return None
        grammar = min(allowed, key=lambda grammar: running[charged[grammar]])
        del self._waiting[grammar]
        self._tenants[grammar] = charged[grammar]
        return grammar

    def end(self, grammar: bytes) -> None:
        """The grammar was compiled, or its compilation failed."""
        del self._tenants[grammar]
