"""Calls of compiled functions that do not look at what they are given.

Such a call from Python first finds out which types its arguments have, by every field of every record. For
the snapshot of a router that takes several times as long as a decision, and its types never change.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numba
import numpy as np

from profiler.compiled import Records

Function = TypeVar("Function", bound=Callable[..., Any])


def machine_code(function: Function, *like: object) -> Function:
    """`function`, compiled, for arguments of the types of `like` and in that order. With any other it reads
    and writes what is not there: they must be made where `like` was. Nothing is called here.

    Where nothing is compiled (`NUMBA_DISABLE_JIT=1`) it is the function itself.
    """
    compiling = getattr(function, "compile", None)
    if compiling is None:
        return function
    found: Function = compiling(tuple(map(numba.typeof, like)))
    return found


def first_record(array: Records, dtype: np.dtype[Any]) -> Any:
    """The first of an array of records of this type, in the same memory, for calls of `machine_code`.

    What `array[0]` is looks its attributes up in Python, which reading it in machine code does, too. Python
    itself needs them.
    """
    return array[0] if numba.config.DISABLE_JIT else array.view(np.ndarray).view(dtype)[0]
