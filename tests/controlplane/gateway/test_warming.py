"""One of several gateways that start together on a node compiles, and the others read its files."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from controlplane.gateway import warming
from profiler import compiled


def test_one_process_compiles_and_others_wait(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Another thread stands for the process: the kernel locks the open file, in whichever process it was
    opened."""
    monkeypatch.setenv(compiled.DIRECTORY_VARIABLE, str(tmp_path))
    begins, has_it = threading.Event(), threading.Event()

    def other() -> None:
        begins.set()
        with warming.one_at_a_time():
            has_it.set()

    thread = threading.Thread(target=other)
    with warming.one_at_a_time():
        thread.start()
        assert begins.wait(60)
        assert not has_it.wait(0.3)
    assert has_it.wait(60)
    thread.join()


def test_each_process_compiles_without_a_writable_cache(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv(compiled.DIRECTORY_VARIABLE, str(tmp_path / "file"))
    with warming.one_at_a_time(), warming.one_at_a_time():
        pass
