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

_ASKED: ContextVar[tuple[str, Any] | None] = ContextVar("ostinato_variant", default=None)


class VariantTable(dict[str, Any]):
    """As a dict, by name: the variant that is asked for. Its values are all that are loaded."""

    def __init__(self) -> None:
        super().__init__()
        self._loaded: dict[int, tuple[str, Any]] = {}  # by uid, in the order of loading

    @contextmanager
    def asking(self, variant: VariantRef) -> Iterator[None]:
        """Inside, this task and what it starts are for a request of `variant`, which is loaded now; it may be
        dropped meanwhile."""
        token = _ASKED.set(self._loaded.get(variant.uid))
        try:
            yield
        finally:
            _ASKED.reset(token)

    def load(self, variant: VariantRef, request: Any) -> None:
        """From now on requests of `variant` find `request`."""
        self._loaded[variant.uid] = (variant.name, request)

    def drop(self, uid: int) -> bool:
        """No request that comes now finds it. Whether one would have."""
        return self._loaded.pop(uid, None) is not None

    def has(self, uid: int) -> bool:
        return uid in self._loaded

    def of_name(self, name: str) -> list[int]:
        """Their uids, in the order of loading."""
        return [uid for uid, (known, _) in self._loaded.items() if known == name]

    def names(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(name for name, _ in self._loaded.values()))

    # --- what an application does with it --------------------------------------------------------

    def get(self, name: str, default: Any = None) -> Any:
        asked = _ASKED.get()
        return default if asked is None or asked[0] != name else asked[1]

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
