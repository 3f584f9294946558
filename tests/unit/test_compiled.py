"""What compiles our decisions, beside other programs in one process."""

from __future__ import annotations

import sys

import numba  # noqa: F401 - what it brings is looked through
import pytest

import profiler.compiled  # noqa: F401


def test_all_that_modules_hold_can_be_looked_through() -> None:
    """As vLLM does it where it exchanges kernels (`vllm.triton_utils.dispatcher`)."""
    ffi = sys.modules["llvmlite.binding.ffi"]
    for value in vars(ffi).values():
        if hasattr(value, "__dict__"):
            vars(value).get("kernel")


def test_functions_of_the_library_are_still_found() -> None:
    from llvmlite.binding import ffi

    assert callable(ffi.lib.LLVMPY_GetVersionInfo)
    with pytest.raises(AttributeError):
        _ = ffi.lib.there_is_no_such_function
