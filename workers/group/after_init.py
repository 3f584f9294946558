"""More for a class of vLLM's to do whenever it makes an object."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

_DONE = "_ostinato_after_init"


def after_init(cls: Any, then: Callable[..., None]) -> None:
    """Have `then(made, *arguments)` called at the end of the class's `__init__(*arguments)`; once, however
    often this is called for a class."""
    if hasattr(cls, _DONE):
        return
    setattr(cls, _DONE, True)
    init = cls.__init__

    @wraps(init)
    def made(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        then(self, *args, **kwargs)

    cls.__init__ = made
