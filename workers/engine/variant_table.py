"""Variants as an application finds them that resolves `model` by name: the one whose uid the request brought.

A name may be registered again while requests of its predecessor are under way, or while a gateway still sends
them. So two variants of one name can be loaded, and which of them is meant is known to each request alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from workers.messages import VariantRef

_ASKED: ContextVar[VariantRef | None] = ContextVar("ostinato_variant", default=None)


@contextmanager
def asking(variant: VariantRef) -> Iterator[None]:
    """What this task looks up inside, and tasks and threads that it starts, is for a request of `variant`."""
    token = _ASKED.set(variant)
    try:
        yield
    finally:
        _ASKED.reset(token)


class VariantTable(dict[str, Any]):
    """As a dict, by name: of what was loaded, the one that is asked for. Its values are all of them."""

    def __init__(self) -> None:
        super().__init__()
        self._loaded: dict[int, tuple[str, Any]] = {}

    def load(self, variant: VariantRef, request: Any) -> None:
        """From now on requests of `variant` find `request`."""
        self._loaded[variant.uid] = (variant.name, request)

    def drop(self, uid: int) -> bool:
        """From now on no request finds it. Whether one would have."""
        return self._loaded.pop(uid, None) is not None

    def has(self, uid: int) -> bool:
        return uid in self._loaded

    def predecessors(self, variant: VariantRef) -> list[int]:
        """Uids of those that had its name before it, the newest last."""
        of_name = (uid for uid, (name, _) in self._loaded.items() if name == variant.name)
        return sorted(uid for uid in of_name if uid < variant.uid)

    def names(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(name for name, _ in self._loaded.values()))

    # --- what an application does with it --------------------------------------------------------

    def get(self, name: str, default: Any = None) -> Any:
        asked = _ASKED.get()
        if asked is None or asked.name != name or asked.uid not in self._loaded:
            return default
        return self._loaded[asked.uid][1]

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and self.get(name) is not None

    def __getitem__(self, name: str) -> Any:
        found = self.get(name)
        if found is None:
            raise KeyError(name)
        return found

    def values(self) -> Any:
        return [request for _, request in self._loaded.values()]

    def __iter__(self) -> Iterator[str]:
        return iter(self.names())

    def __len__(self) -> int:
        return len(self._loaded)
