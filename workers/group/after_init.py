"""Adds an action to a class of vLLM's, after each creation of an object."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

_DONE = "_ostinato_after_init"


def after_init(cls: Any, then: Callable[..., None]) -> None:
    """Call `then(made, *arguments)` at the end of the class's `__init__(*arguments)`.

    Only the first call for a class has an effect.
    """
    if hasattr(cls, _DONE):
        return
    setattr(cls, _DONE, True)
    init = cls.__init__

    @wraps(init)
    def made(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        then(self, *args, **kwargs)

    cls.__init__ = made
