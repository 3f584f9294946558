"""Each GGUF file is read once.

transformers reads a file three times for a tokenizer and a configuration, and 262,144 tokens take 10 s each
time.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from profiler.patches.target import Target

READER = Target("gguf.gguf_reader", "GGUFReader", read={"0.19": "f003289a702a"})


@contextmanager
def read_once() -> Iterator[None]:
    """Within the context, readers of the same path are one object."""
    import gguf

    def make(reader: Callable[[str], Any]) -> Callable[[Any], Any]:
        return functools.cache(lambda path: reader(str(path)))

    put_back = READER.replace(make, gguf)
    try:
        yield
    finally:
        put_back()
