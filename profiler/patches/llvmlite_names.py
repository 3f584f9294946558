"""Special names, such as `__dict__`, are no functions of llvmlite's library.

The library takes every name for one of its functions. vLLM inspects everything in a module, so its engine
failed to start in a process that had imported numba.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from profiler.patches.target import Target

ATTRIBUTE = Target(
    "llvmlite.binding.ffi", "_lib_wrapper.__getattr__", ("name",), read={"0.47": "3bb1f8f54cd8"}
)


def install() -> None:
    """Make the library raise AttributeError for special names in this process."""
    ATTRIBUTE.replace_once(_hiding)


def _hiding(function_named: Callable[[Any, str], Any]) -> Callable[[Any, str], Any]:
    def attribute(self: Any, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return function_named(self, name)

    return attribute
