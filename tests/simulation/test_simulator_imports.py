"""The simulator has the decisions of requests and nothing that serves: what a run has imported."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
LIST = "import json, sys, controlplane.simulation.simulate; print(json.dumps(sorted(sys.modules)))"
PURE = {
    "field_checks",
    "request_fields",
    "request_queue",
    "admission",
    "forecast",
    "request_terms",
    "tenants",
    # the table of endpoints, which the terms of a request read
    "endpoints",
    "messages_fields",
    "openai_fields",
    "responses_fields",
    "token_fields",
}
HEAVY = {"ray", "torch", "vllm", "fastapi", "httpx", "redis", "uvicorn", "prometheus_client"}


def test_nothing_that_serves_is_imported() -> None:
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", LIST]
    out = subprocess.run(command, check=True, capture_output=True, text=True, env=env, cwd=ROOT).stdout
    modules = json.loads(out)
    traffic = {name.split(".")[2] for name in modules if name.startswith("controlplane.traffic.")}
    assert traffic == PURE
    assert not [name for name in modules if name.startswith("controlplane.gateway")]
    assert not HEAVY & set(modules)
