"""Importing vLLM with less work: it takes 9 s of CPU, in every process of an engine.

A fifth of that is the collector of cyclic garbage, which looks again and again at what has just been
imported and will never be garbage. And a process that multiprocessing spawns imports the main module of
its parent first: in a replica that is Ray's, of which an engine's core needs nothing.
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
    """Nothing is collected inside; what is there at the end is left alone for good."""
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
    """Processes spawned inside import `workers.spawned` in place of this process's main module."""
    main = sys.modules["__main__"]
    own = main.__spec__
    main.__spec__ = find_spec(CHILD_MAIN)
    try:
        yield
    finally:
        main.__spec__ = own
