"""Variants for an application that resolves `model` by name: it finds the variant whose uid the request
brought.

A name may be registered again while requests of its predecessor are under way, or while a gateway still sends
them. So two variants of one name can be loaded, and each request knows which of them it means.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

from workers.messages import VariantRef


class _Loaded(NamedTuple):
    """A loaded variant: its name, and vLLM's request for it."""

    name: str
    request: Any


_ASKED: ContextVar[_Loaded | None] = ContextVar("ostinato_variant", default=None)


class VariantTable(dict[str, Any]):
    """A dict by name that finds the variant of the current request. Its values are all loaded variants."""

    def __init__(self) -> None:
        super().__init__()
        self._loaded: dict[int, _Loaded] = {}  # by uid, in the order of loading

    @contextmanager
    def asking(self, variant: VariantRef) -> Iterator[None]:
        """Within the context, this task and its child tasks serve a request of `variant`.

        `variant` is loaded now; it may be dropped meanwhile.
        """
        token = _ASKED.set(self._loaded.get(variant.uid))
        try:
            yield
        finally:
            _ASKED.reset(token)

    def load(self, variant: VariantRef, request: Any) -> None:
        """Make requests of `variant` find `request`."""
        self._loaded[variant.uid] = _Loaded(variant.name, request)

    def drop(self, uid: int) -> bool:
        """Make no later request find the variant; returns whether it was loaded."""
        return self._loaded.pop(uid, None) is not None

    def has(self, uid: int) -> bool:
        return uid in self._loaded

    def of_name(self, name: str) -> list[int]:
        """The uids of the variants with this name, in the order of loading."""
        return [uid for uid, (known, _) in self._loaded.items() if known == name]

    def names(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(name for name, _ in self._loaded.values()))

    # --- the part that an application uses -------------------------------------------------------

    def get(self, name: str, default: Any = None) -> Any:
        asked = _ASKED.get()
        return default if asked is None or asked.name != name else asked.request

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
