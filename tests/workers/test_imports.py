"""The imports that vLLM is spared, in processes of their own."""

from __future__ import annotations

import gc
import subprocess
import sys
from pathlib import Path

from workers.imports import uncollected

PARENT = """
import multiprocessing, sys
from workers import imports

print("main of", __name__)

if __name__ == "__main__":
    imports.CHILD_MAIN = "workers.addresses"
    context = multiprocessing.get_context("spawn")
    for quick in (False, True):
        if quick:
            with imports.quick_children():
                child = context.Process(target=print, args=("child",))
                child.start()
        else:
            child = context.Process(target=print, args=("child",))
            child.start()
        child.join()
        assert child.exitcode == 0
        print("ended", flush=True)
    assert __spec__ is None
"""


def test_nothing_is_collected_inside() -> None:
    assert gc.isenabled()
    with uncollected():
        assert not gc.isenabled()
    assert gc.isenabled()
    gc.disable()
    try:
        with uncollected():
            pass
        assert not gc.isenabled()  # as it was
    finally:
        gc.enable()
        gc.unfreeze()


def test_a_quick_child_does_not_import_the_main_module_of_its_parent(tmp_path: Path) -> None:
    script = tmp_path / "parent.py"
    script.write_text(PARENT)
    ended = subprocess.run(
        [sys.executable, "-u", str(script)], capture_output=True, text=True, check=True, timeout=600
    )
    first, second, rest = ended.stdout.split("ended\n")
    assert first.split("\n") == ["main of __main__", "main of __mp_main__", "child", ""]
    assert second.split("\n") == ["child", ""]
    assert not rest
