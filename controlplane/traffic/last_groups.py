"""Which group had the last request of a session, or with the same beginning: its KV cache may have more of
the prompt. Pure."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, NamedTuple, TypeVar

Group = TypeVar("Group")

MOST = 20_000


class Last(NamedTuple, Generic[Group]):
    """`tokens` of the prompt, and of the answer to it, may be cached there."""

    group: Group
    tokens: float


class LastGroups(Generic[Group]):
    """Of at most `most` keys: those used longest ago are forgotten."""

    def __init__(self, most: int = MOST) -> None:
        self._most = most
        self._last: OrderedDict[Hashable, Last[Group]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._last)

    def find(self, key: Hashable) -> Last[Group] | None:
        return self._last.get(key)

    def note(self, key: Hashable, group: Group, tokens: float) -> None:
        self._last.pop(key, None)
        self._last[key] = Last(group, tokens)
        if len(self._last) > self._most:
            self._last.popitem(last=False)
