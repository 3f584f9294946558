"""A folder of links to a model stays as long as an engine uses it, and no longer."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from testkit import checkpoints
from workers.model_view import hold_view, make_view, sweep_views

HOLD = """
import sys
from pathlib import Path
from workers.model_view import hold_view
held = hold_view(Path(sys.argv[1]), Path(sys.argv[2]))
print(held.path, flush=True)
sys.stdin.read()
"""


@contextmanager
def holding(folder: Path, parent: Path) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """Another process that has the view."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(folder), str(parent)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    try:
        yield process, Path(process.stdout.readline().strip())
    finally:
        process.kill()
        process.communicate()


def test_unused_views_are_removed_and_used_views_stay(tmp_path: Path) -> None:
    parent = tmp_path / "views"
    mine = checkpoints.write_model(tmp_path / "mine")
    theirs = checkpoints.write_model(tmp_path / "theirs")
    held, again = hold_view(mine, parent), hold_view(mine, parent)
    assert held.path == again.path
    with holding(theirs, parent) as (process, view):
        (parent / f".{view.name}.half-made").mkdir()
        sweep_views(parent)
        assert (view.is_dir(), held.path.is_dir()) == (True, True)
        process.kill()  # as an engine that ran out of memory
        process.wait()
        sweep_views(parent)
        assert (view.is_dir(), held.path.is_dir()) == (False, True)
    held.release()
    sweep_views(parent)
    assert again.path.is_dir(), "another engine of this process has it"
    again.release()
    sweep_views(parent)
    assert list(parent.iterdir()) == []
    assert (mine / "model.safetensors").is_file()


def test_views_of_an_older_version_are_left(tmp_path: Path) -> None:
    view = make_view(checkpoints.write_model(tmp_path / "model"), tmp_path / "views")
    sweep_views(tmp_path / "views")
    assert view.is_dir()


def test_held_views_survive_every_sweep(tmp_path: Path) -> None:
    """Two threads sweep all the time, and two take the view and look at it."""
    folder, parent, ended = checkpoints.write_model(tmp_path / "model"), tmp_path / "views", threading.Event()
    missing: list[Path] = []

    def sweep() -> None:
        while not ended.is_set():
            sweep_views(parent)

    def use() -> None:
        for _ in range(200):
            held = hold_view(folder, parent)
            if not (held.path / "model.safetensors").is_file():
                missing.append(held.path)
            held.release()

    sweepers, users = ([threading.Thread(target=target) for _ in range(2)] for target in (sweep, use))
    for thread in (*sweepers, *users):
        thread.start()
    for thread in users:
        thread.join()
    ended.set()
    for thread in sweepers:
        thread.join()
    assert missing == []
