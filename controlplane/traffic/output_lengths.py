"""Expected lengths of answers: the mean of observed lengths by variant. Pure."""

from __future__ import annotations

from collections import OrderedDict

# The guess before any observation, and the number of answers over which the exponential mean extends.
FIRST_GUESS = 128.0
MEMORY = 32.0
MOST_VARIANTS = 4096


class OutputLengths:
    """Means of at most `most` variants; the least recently used ones are forgotten."""

    def __init__(self, most: int = MOST_VARIANTS) -> None:
        self._most = most
        self._means: OrderedDict[int, tuple[float, float]] = OrderedDict()  # by uid: (mean, seen)
        self._of_all = (FIRST_GUESS, 0.0)

    def expected(self, uid: int, limit: int) -> float:
        """Tokens, 1 or more, at most `limit` (0: no limit). A variant without observations gets the mean of
        all."""
        mean, _ = self._means.get(uid, self._of_all)
        return max(1.0, min(mean, limit) if limit > 0 else mean)

    def observe(self, uid: int, tokens: float) -> None:
        self._means[uid] = _with(self._means.pop(uid, (0.0, 0.0)), tokens)
        self._of_all = _with(self._of_all, tokens)
        if len(self._means) > self._most:
            self._means.popitem(last=False)


def _with(known: tuple[float, float], tokens: float) -> tuple[float, float]:
    mean, seen = known
    seen = min(seen + 1.0, MEMORY)
    return mean + (tokens - mean) / seen, seen
