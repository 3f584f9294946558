"""The wheel: alone in an empty environment it gives the client and the command line. Needs an index."""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
import venv
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("controlplane", "workers", "placement", "profiler")
PIP = ("-m", "pip", "--disable-pip-version-check", "-q")

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy: what an earlier build left in the repository is not packed."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    for package in PACKAGES:
        shutil.copytree(ROOT / package, source / package, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, source)
    command = [
        sys.executable,
        *PIP,
        "wheel",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        str(folder),
        str(source),
    ]
    subprocess.run(command, check=True)
    return next(folder.glob("ostinato-*.whl"))


@pytest.fixture(scope="module")
def alone(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The programs of an environment with the wheel and its base dependencies."""
    folder = tmp_path_factory.mktemp("alone")
    venv.create(folder, with_pip=True)
    subprocess.run([folder / "bin" / "python", *PIP, "install", str(wheel)], check=True)
    return folder / "bin"


@pytest.fixture
def nowhere() -> Iterator[str]:
    """A URL at which nothing answers: its port is taken, but no process listens."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{taken.getsockname()[1]}"


def run(folder: Path, *argv: str | Path) -> subprocess.CompletedProcess[str]:
    """Outside the repository, and without its modules."""
    return subprocess.run(
        argv, capture_output=True, text=True, cwd=folder, env={"HOME": str(folder)}, check=False
    )


def test_the_wheel_holds_every_file_of_the_packages(wheel: Path) -> None:
    held = set(zipfile.ZipFile(wheel).namelist())
    for package in PACKAGES:
        files = (path for path in (ROOT / package).rglob("*") if path.is_file())
        there = {str(path.relative_to(ROOT)) for path in files if "__pycache__" not in path.parts}
        assert there <= held


def test_the_wheel_alone_gives_the_command_line(alone: Path, nowhere: str, tmp_path: Path) -> None:
    shown = run(tmp_path, alone / "ostinato", "--help")
    assert shown.returncode == 0, shown.stderr
    assert "evaluate-estimator" in shown.stdout
    unanswered = run(tmp_path, alone / "ostinato", "--url", nowhere, "status")
    assert unanswered.returncode == 3
    assert unanswered.stderr.startswith(f"Error: no server answers at {nowhere}")


def test_the_wheel_alone_gives_the_client(alone: Path, tmp_path: Path) -> None:
    code = "from controlplane.client.client import Client; Client('http://127.0.0.1:1').close()"
    assert run(tmp_path, alone / "python", "-c", code).returncode == 0


@pytest.mark.parametrize("command", ["demo", "up", "plan scenario.yaml"])
def test_a_command_with_missing_packages_names_the_extra_to_install(
    command: str, alone: Path, tmp_path: Path
) -> None:
    ended = run(tmp_path, alone / "ostinato", *command.split())
    assert ended.returncode == 1
    assert "is not installed" in ended.stderr
    assert "ostinato[cpu]" in ended.stderr
    assert "Traceback" not in ended.stderr
