"""What compiles our decisions, beside other programs in one process."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

import numba  # noqa: F401 - what it brings is looked through
import pytest

from profiler import compiled


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


def test_one_compiles_and_others_wait(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Here another thread: the kernel locks what was opened, whoever opened it."""
    monkeypatch.setenv(compiled.DIRECTORY_VARIABLE, str(tmp_path))
    begins, has_it = threading.Event(), threading.Event()

    def other() -> None:
        begins.set()
        with compiled.one_at_a_time():
            has_it.set()

    thread = threading.Thread(target=other)
    with compiled.one_at_a_time():
        thread.start()
        assert begins.wait(60)
        assert not has_it.wait(0.3)
    assert has_it.wait(60)
    thread.join()


def test_where_no_file_can_be_written_each_compiles(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv(compiled.DIRECTORY_VARIABLE, str(tmp_path / "file"))
    with compiled.one_at_a_time(), compiled.one_at_a_time():
        pass
