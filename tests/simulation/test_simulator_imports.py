"""The simulator has the gateway's decisions and nothing that serves: what a run has imported."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
LIST = "import json, sys, controlplane.simulation.simulate; print(json.dumps(sorted(sys.modules)))"
PURE = {"waiting_line", "admission", "request_terms", "tenants"}
HEAVY = {"ray", "torch", "vllm", "fastapi", "httpx", "redis", "uvicorn", "prometheus_client"}


def test_of_the_gateway_only_what_is_pure_is_imported() -> None:
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", LIST]
    out = subprocess.run(command, check=True, capture_output=True, text=True, env=env, cwd=ROOT).stdout
    modules = json.loads(out)
    gateway = {name.split(".")[2] for name in modules if name.startswith("controlplane.gateway.")}
    assert gateway == PURE
    assert not HEAVY & set(modules)
