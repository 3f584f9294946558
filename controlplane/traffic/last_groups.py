"""The group that had the last request of a session, or with the same beginning: its KV cache may hold more of
the prompt. Pure."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, NamedTuple, TypeVar

Group = TypeVar("Group")

MOST = 20_000


class Last(NamedTuple, Generic[Group]):
    """`tokens` of the prompt and its answer may be cached in this group."""

    group: Group
    tokens: float


class LastGroups(Generic[Group]):
    """At most `most` keys; the least recently used ones are forgotten."""

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
