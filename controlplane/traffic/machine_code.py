"""Calls of compiled functions without type checks of their arguments.

A normal call from Python first determines the types of its arguments, by every field of every record. For a
router's snapshot that takes several times as long as a decision, and its types never change.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numba
import numpy as np

from profiler.compiled import Records

Function = TypeVar("Function", bound=Callable[..., Any])


def machine_code(function: Function, *like: object) -> Function:
    """`function`, compiled for arguments of the types of `like`, in this order. With arguments of other types
    it would access invalid memory: they must come from the same place as `like`. Nothing is called here.

    Without compilation (`NUMBA_DISABLE_JIT=1`) the result is the function itself.
    """
    compiling = getattr(function, "compile", None)
    if compiling is None:
        return function
    found: Function = compiling(tuple(map(numba.typeof, like)))
    return found


def first_record(array: Records, dtype: np.dtype[Any]) -> Any:
    """The first record of an array of this type, in the same memory, for calls of `machine_code`.

    `array[0]` looks its attributes up in Python, even when machine code reads it. Without compilation, Python
    needs these attributes.
    """
    return array[0] if numba.config.DISABLE_JIT else array.view(np.ndarray).view(dtype)[0]
