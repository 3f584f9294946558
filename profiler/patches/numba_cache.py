"""Another place for numba's machine code.

Numba identifies sources by path and time, so it would compile the same release in another folder again. Its
option for other places (`CACHE_LOCATOR_CLASSES`) is an environment variable that older versions lack.
"""

from __future__ import annotations

from typing import Any

from numba.core import caching

from profiler.patches.target import Target

LOCATORS = Target("numba.core.caching", "CacheImpl._locator_classes", read={"0.65": "0d3bff0bec97"})


def of_numba(name: str) -> Any:
    """A class of numba's cache; older versions of numba have it with an underscore."""
    return getattr(caching, name, None) or getattr(caching, f"_{name}")


def ask_first(locator: type) -> None:
    """Make numba ask this locator of machine code before its own, in this process."""
    LOCATORS.replace(lambda locators: [locator, *locators], of_numba("CacheImpl"))
