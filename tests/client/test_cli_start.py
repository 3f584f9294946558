"""Commands that only talk to the API start at once: they import nothing that computes or serves."""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from controlplane.cli.lazy_commands import LazyCommand
from controlplane.cli.main import COMMANDS
from testkit.client.fake_api import FakeApi

ROOT = Path(__file__).resolve().parents[2]
HEAVY = {
    *("numpy", "scipy", "pandas", "matplotlib", "torch", "vllm", "transformers", "safetensors"),
    *("ray", "redis", "zmq", "fastapi", "starlette", "uvicorn", "httptools", "prometheus_client"),
    *("psutil", "yaml"),
}
OURS = {"controlplane", "workers", "placement", "profiler"}
# Our modules that a client imports, outside its own: the words of the API, and no record, plan or message.
CLIENTS = {
    *(
        "controlplane",
        "controlplane.errors",
        "controlplane.api_keys",
        "controlplane.cli",
        "controlplane.client",
        "controlplane.management",
        "controlplane.printable",
    ),
    *("controlplane.state", "controlplane.state.base", "controlplane.state.terms"),
    *("workers", "workers.tiers", "profiler", "profiler.quantization", "profiler.variant_limit"),
    *("profiler.figures", "profiler.parser_names", "workers.fetching", "workers.fetching.remote_source"),
}
WITH_OTHERS_BELOW = ("controlplane.cli.", "controlplane.client.", "controlplane.management.schemas")
OF_OTHER_COMMANDS = {
    *("controlplane.management.schemas.cluster", "controlplane.management.schemas.estimates"),
    *("controlplane.management.schemas.rebalance", "controlplane.cli.deployments"),
}
CALLS = (
    *("status", "status smol", "models", "describe smol", "cluster", "operations", "logs smol", "rebalance"),
    *("deploy smol", "undeploy smol", "delete smol", "register smol /a", "infer smol hello", "watch op-1"),
    *("cancel op-1", "prefetch v1", "tune smol --max-active-variants 2", "keys new"),
)
# A client needs these three packages; the rest of a command should add at most half as many modules.
LIST_BARE = """
import json, sys, httpx, pydantic, typer
pydantic.BaseModel
print(json.dumps(sorted(name for name in sys.modules if sys.modules[name])))
"""
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
    """The exit code of a command line, and what a fresh interpreter has imported after it: all packages and
    modules, by their full names."""
    code, modules = json.loads(child(LIST_MODULES, *argv).splitlines()[-1])
    return code, set(modules)


@pytest.mark.parametrize("argv", [["--help"], ["status", "--help"], ["version"]], ids=" ".join)
def test_help_imports_nothing_heavy(argv: list[str]) -> None:
    code, modules = modules_after(*argv)
    assert code == 0
    assert not modules & HEAVY


def test_the_list_of_commands_needs_no_client() -> None:
    assert not modules_after("--help")[1] & {"httpx", "pydantic", "pydantic_settings"}


@pytest.mark.parametrize("command", CALLS)
def test_a_call_of_the_api_imports_the_apis_words_and_nothing_heavy(command: str, api: FakeApi) -> None:
    code, modules = modules_after("--url", api.url, *command.split())
    assert code == 0
    assert not modules & (HEAVY | {"pygments"})
    ours = {name for name in modules if name.partition(".")[0] in OURS}
    assert {name for name in ours if not name.startswith(WITH_OTHERS_BELOW)} <= CLIENTS


def test_status_imports_nothing_of_other_commands(api: FakeApi) -> None:
    modules = modules_after("--url", api.url, "status")[1]
    assert "controlplane.cli.overview" in modules
    assert not modules & OF_OTHER_COMMANDS


def test_a_call_without_a_server_imports_nothing_heavy(nowhere: str) -> None:
    code, modules = modules_after("--url", nowhere, "status")
    assert code == 3
    assert not modules & HEAVY


def test_help_and_status_import_little_more_than_what_they_are_made_of(api: FakeApi) -> None:
    """The number of modules does not depend on the machine's load, as CPU time does."""
    bare = len(json.loads(child(LIST_BARE)))
    assert len(modules_after("--help")[1]) < bare
    assert len(modules_after("--url", api.url, "status")[1]) < 1.5 * bare


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.name)
def test_the_list_of_commands_repeats_the_commands_help(command: LazyCommand) -> None:
    assert command.name
    function = getattr(import_module(command.module), command.name.replace("-", "_"))
    first_paragraph = (inspect.getdoc(function) or "").partition("\n\n")[0]
    assert command.help == " ".join(first_paragraph.split())
