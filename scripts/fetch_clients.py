#!/usr/bin/env python3
"""Fetch clients of other versions and makers into .tools/clients (not committed), for the tests.

    .venv/bin/python scripts/fetch_clients.py [NAME...]

Python's have an environment each, which sees the packages of .venv and holds what it lacks; Node's a folder.
Run again, it does nothing. Needs PyPI and npm; no install script is run.
"""

from __future__ import annotations

import argparse
import fcntl
import shutil
import subprocess
import sys
import venv
from pathlib import Path

FOLDER = Path(__file__).resolve().parent.parent / ".tools" / "clients"
# openai of .venv is the newest, 3.x.
PYTHON = {
    "openai1": ("openai==1.109.1",),
    "openai2": ("openai==2.54.0",),
    "litellm": ("litellm==1.110.2",),
    "guidellm": ("guidellm==0.8.1",),
}
NODE = {"node": ("openai@7.59.0",)}


class ClientUnavailable(RuntimeError):
    """A client could not be fetched; the message says what to install."""


def fetch(name: str, folder: Path = FOLDER) -> Path:
    """The client's Python, or the folder in which Node finds it; fetched if it is not there yet."""
    where = folder / name
    where.mkdir(parents=True, exist_ok=True)
    with (where / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # test workers may ask at once
        wanted = " ".join((PYTHON | NODE)[name])
        stamp = where / ".wanted"
        if not stamp.exists() or stamp.read_text() != wanted:
            _for_python(where, PYTHON[name]) if name in PYTHON else _for_node(where, NODE[name])
            stamp.write_text(wanted)
    return where / "env" / "bin" / "python" if name in PYTHON else where


def _for_python(where: Path, packages: tuple[str, ...]) -> None:
    environment = where / "env"
    venv.create(environment, clear=True)
    (own,) = environment.glob("lib/python*/site-packages")
    # Behind its own packages it has those of the environment that runs this.
    others = [path for path in sys.path if path.endswith("site-packages")]
    (own / "others.pth").write_text("\n".join(others) + "\n")
    pip = [sys.executable, "-m", "pip", "--python", str(environment / "bin" / "python"), "install"]
    _run([*pip, "--quiet", "--disable-pip-version-check", "--no-warn-conflicts", *packages], "PyPI")


def _for_node(where: Path, packages: tuple[str, ...]) -> None:
    npm = shutil.which("npm")
    if npm is None:
        raise ClientUnavailable("npm is missing: `make system` installs it from Debian")
    (where / "package.json").write_text("{}")
    flags = ["--silent", "--ignore-scripts", "--no-audit", "--no-fund", "--no-package-lock"]
    _run([npm, "install", *flags, "--prefix", str(where), *packages], "npm")


def _run(command: list[str], source: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        told = (done.stderr or done.stdout).strip()[-800:]
        raise ClientUnavailable(f"{source} did not give {command[-1]}: {told}")


def main() -> None:
    known = [*PYTHON, *NODE]
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", choices=[*known, []], help=", ".join(known))
    for name in parser.parse_args().names or known:
        print(f"{name}: {fetch(name)}", flush=True)


if __name__ == "__main__":
    try:
        main()
    except ClientUnavailable as error:
        sys.exit(str(error))
