"""The last lines of one process, from Ray's log folder."""

from __future__ import annotations

import os
from pathlib import Path

from workers.server.process_logs import LONGEST_LINE, tail


def write(folder: Path, name: str, text: bytes, age: int = 0) -> None:
    (folder / name).write_bytes(text)
    os.utime(folder / name, (1e9 - age, 1e9 - age))


def test_only_this_process_oldest_file_first(tmp_path: Path) -> None:
    write(tmp_path, "worker-a-01-12.out", b"out 1\nout 2\n", age=1)
    write(tmp_path, "worker-a-01-12.err", b"err 1\n")
    write(tmp_path, "worker-b-01-112.out", b"another\n")
    write(tmp_path, "worker-b-01-12.log", b"another\n")
    assert tail(tmp_path, 12, 10) == "out 1\nout 2\nerr 1\n"
    assert tail(tmp_path, 12, 2) == "out 2\nerr 1\n"


def test_nothing_is_nothing(tmp_path: Path) -> None:
    assert tail(tmp_path, 12, 10) == ""
    assert tail(tmp_path / "missing", 12, 10) == ""


def test_odd_bytes_and_long_lines(tmp_path: Path) -> None:
    write(tmp_path, "worker-a-01-12.out", b"\xff\n" + b"x" * 10_000)
    first, second = tail(tmp_path, 12, 10).splitlines()
    assert (first, len(second)) == ("\ufffd", LONGEST_LINE)
