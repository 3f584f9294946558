"""Imports vLLM with less work: it takes 9 s of CPU, in every process of an engine.

A fifth of that is the cyclic garbage collector, which checks newly imported objects again and again, although
they never become garbage. And a process spawned by multiprocessing first imports the main module of its
parent. In a replica that is Ray's, which an engine's core does not need.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec

CHILD_MAIN = "workers.spawned"


@contextmanager
def uncollected() -> Iterator[None]:
    """Within the context, no garbage is collected; objects that exist at its end are never checked again."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()


@contextmanager
def quick_children() -> Iterator[None]:
    """Processes spawned within the context import `workers.spawned` instead of this process's main module."""
    main = sys.modules["__main__"]
    own = main.__spec__
    main.__spec__ = find_spec(CHILD_MAIN)
    try:
        yield
    finally:
        main.__spec__ = own
