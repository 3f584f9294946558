"""Functions compiled to machine code (numba), for decisions that are made for every request or step.

A compiled function is a plain function of numbers and arrays of records. With `NUMBA_DISABLE_JIT=1` it runs
as Python. Machine code is kept between processes in `OSTINATO_COMPILED_DIR` (default:
`~/.cache/ostinato/compiled`), in a folder named after the digest of all packages with such functions. Numba
itself does not notice changes in a function or a constant that a compiled function uses.
"""

from __future__ import annotations

import functools
import hashlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import numba
import numpy as np
import numpy.typing as npt

from profiler.patches import llvmlite_names, numba_cache

Function = TypeVar("Function", bound=Callable[..., Any])

# An array of records: `array[i].field` reads and writes. The dtype given at its creation names the fields.
Records: TypeAlias = Any

DIRECTORY_VARIABLE = "OSTINATO_COMPILED_DIR"
_ROOT = Path(__file__).resolve().parent.parent
_PACKAGES = (
    "profiler",
    "workers/scheduling",
    "workers/kernels/copying",
    "workers/kernels/sparse_delta",
    "controlplane/routing",
    "controlplane/baselines/routing",
    "controlplane/simulation",
)


def compiled(function: Function) -> Function:
    """Compile `function` to machine code when it is first called with new argument types.

    Neither it nor the functions that it calls may create an array: the caller passes the memory. Otherwise
    numba counts references for every array that is passed on, which takes longer than most of our functions.
    Division by zero gives infinity or NaN, as in numpy. Other threads run meanwhile.
    """
    _use_cache()
    made: Function = numba.njit(cache=True, nogil=True, error_model="numpy", _nrt=False)(function)
    return made


def records(dtype: npt.DTypeLike, shape: int | Sequence[int]) -> Records:
    """An array of records, all zero."""
    return np.zeros(shape, dtype=np.dtype(dtype, align=True)).view(np.recarray)


llvmlite_names.install()


@functools.cache
def _use_cache() -> None:
    if not numba.config.DISABLE_JIT:
        numba.config.CACHE_DIR = str(folder())
        numba_cache.ask_first(_Place)


class _Place(numba_cache.of_numba("UserProvidedCacheLocator")):  # type: ignore[misc]
    """The place of a function's machine code, by the digest of our sources."""

    def __init__(self, function: Callable[..., Any], file: str) -> None:
        super().__init__(function, file)
        package = Path(file).resolve().parent.relative_to(_ROOT)
        self._cache_path = str(Path(numba.config.CACHE_DIR, *package.parts))

    def get_source_stamp(self) -> str:
        """Always the same: the folder's name is already the digest of the sources."""
        return ""

    @classmethod
    def from_function(cls, function: Callable[..., Any], file: str) -> Any:
        """The place of the file's machine code; None for a file that the digest does not cover."""
        path = Path(file).resolve()
        known = any(path.is_relative_to(_ROOT / package) for package in _PACKAGES)
        return super().from_function(function, file) if known else None


def folder() -> Path:
    """The folder with the machine code of these sources."""
    return _directory() / _digest()


def _directory() -> Path:
    chosen = os.environ.get(DIRECTORY_VARIABLE)
    return Path(chosen) if chosen else Path.home() / ".cache" / "ostinato" / "compiled"


@functools.cache
def _digest() -> str:
    digest = hashlib.sha256(f"{numba.__version__} {np.__version__}".encode())
    for path in sorted(path for package in _PACKAGES for path in (_ROOT / package).rglob("*.py")):
        digest.update(str(path.relative_to(_ROOT)).encode() + path.read_bytes())
    return digest.hexdigest()[:16]
