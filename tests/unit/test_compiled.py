"""The compiler of our decisions, together with other programs in one process."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numba  # noqa: F401 - what it brings is looked through
import pytest

from profiler import compiled


def test_all_that_modules_hold_can_be_looked_through() -> None:
    """vLLM's way to exchange kernels (`vllm.triton_utils.dispatcher`)."""
    ffi = sys.modules["llvmlite.binding.ffi"]
    for value in vars(ffi).values():
        if hasattr(value, "__dict__"):
            vars(value).get("kernel")


def test_functions_of_the_library_are_still_found() -> None:
    from llvmlite.binding import ffi

    assert callable(ffi.lib.LLVMPY_GetVersionInfo)
    with pytest.raises(AttributeError):
        _ = ffi.lib.there_is_no_such_function


@pytest.mark.slow
def test_the_same_sources_in_another_folder_are_compiled_once(tmp_path: Path) -> None:
    """As for another installation, or a new one; functions that differ are compiled for themselves."""
    source = "from profiler.compiled import compiled\n\n\n@compiled\ndef twice(n):\n    return 2 * n\n"
    others = source.replace("2 * n", "3 * n")
    found = [
        counted(tmp_path, name, text)
        for name, text in {"first": source, "second": source, "other": others}.items()
    ]
    assert found == ["14 compiled", "14 read", "21 compiled"]


def counted(folder: Path, name: str, source: str) -> str:
    """The function's result for 7, in a process of its own, and whether it was compiled for that."""
    package = folder / name / "profiler"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    shutil.copy(compiled.__file__, package)
    shutil.copytree(Path(compiled.__file__).with_name("patches"), package / "patches", dirs_exist_ok=True)
    (package / "numbers.py").write_text(source)
    code = (
        "from profiler.numbers import twice; import profiler; assert profiler.__path__ == [%r]; "
        "print(twice(7), 'read' if sum(twice.stats.cache_hits.values()) else 'compiled')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code % str(package)],
        env={**os.environ, "PYTHONPATH": str(package.parent), compiled.DIRECTORY_VARIABLE: str(folder)},
        cwd=folder,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return done.stdout.strip()
