"""Commands that only talk to the API start at once: they import nothing that computes or serves."""

from __future__ import annotations

import inspect
import json
import os
import resource
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
from fake_api import FakeApi

from controlplane.cli.lazy_commands import LazyCommand
from controlplane.cli.main import COMMANDS

ROOT = Path(__file__).resolve().parents[2]
HEAVY = {
    *("numpy", "scipy", "pandas", "matplotlib", "torch", "vllm", "transformers", "safetensors"),
    *("ray", "redis", "zmq", "fastapi", "starlette", "uvicorn", "httptools", "prometheus_client"),
    *("psutil", "yaml"),
}
# What a client cannot do without; the rest of a command should cost no more than as much again.
BARE = "import httpx, pydantic, typer; pydantic.BaseModel"
LIST_MODULES = """
import json, sys
from controlplane.cli.main import main
try:
    main()
except SystemExit as ended:
    code = ended.code
print("\\n" + json.dumps([code, sorted(name for name in sys.modules if sys.modules[name])]))
"""


def child(code: str, *argv: str) -> str:
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", code, *argv]
    return subprocess.run(command, check=True, capture_output=True, text=True, env=env, cwd=ROOT).stdout


def modules_after(*argv: str) -> tuple[int, set[str]]:
    """The exit code of a command line, and what a fresh interpreter has imported after it."""
    code, modules = json.loads(child(LIST_MODULES, *argv).splitlines()[-1])
    return code, {name.partition(".")[0] for name in modules}


def cpu_s(code: str, *argv: str) -> float:
    """The least of three runs: what other programs add is no part of it."""
    found = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        child(code, *argv)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        found.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return min(found)


@pytest.mark.parametrize("argv", [["--help"], ["status", "--help"], ["version"]], ids=" ".join)
def test_help_imports_nothing_heavy(argv: list[str]) -> None:
    code, modules = modules_after(*argv)
    assert code == 0
    assert not modules & HEAVY


def test_the_list_of_commands_needs_no_client() -> None:
    assert not modules_after("--help")[1] & {"httpx", "pydantic", "pydantic_settings"}


@pytest.mark.parametrize("command", ["status", "models", "describe smol", "deploy smol", "cluster"])
def test_a_call_of_the_api_imports_nothing_heavy(command: str, api: FakeApi) -> None:
    code, modules = modules_after("--url", api.url, *command.split())
    assert code == 0
    assert not modules & (HEAVY | {"pygments"})


def test_a_call_that_nobody_answers_imports_nothing_heavy(nowhere: str) -> None:
    code, modules = modules_after("--url", nowhere, "status")
    assert code == 3
    assert not modules & HEAVY


def test_help_and_status_cost_little_more_than_what_they_are_made_of(api: FakeApi) -> None:
    bare = cpu_s(BARE)
    assert cpu_s("from controlplane.cli.main import run; run(['--help'])") < 1.5 * bare
    status = "import sys; from controlplane.cli.main import run; run(['--url', sys.argv[1], 'status'])"
    assert cpu_s(status, api.url) < 3 * bare


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.name)
def test_the_list_says_what_the_help_of_the_command_says(command: LazyCommand) -> None:
    assert command.name
    function = getattr(import_module(command.module), command.name.replace("-", "_"))
    assert command.help == " ".join((inspect.getdoc(function) or "").split())
