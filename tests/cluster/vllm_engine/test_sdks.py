"""SDKs as people have them, in several versions and of several makers, with tools on the base and a variant.

Each runs in a process of its own, with packages that `scripts/fetch_clients.py` fetches.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from scripts import fetch_clients
from testkit.cluster.clusters import Cluster

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3000)]

SDKS = Path(__file__).parents[1] / "sdks"
SPACES = "\u0120\u010a\u0109\u010d"  # as in test_tools.py
UTC = {"calls": [["get_time", {"zone": "utc"}]], "text": None, "ended": "tool_calls"}


@pytest.fixture(scope="module")
def bias(base_folder: Path) -> str:
    """Against white space, without end of which a model without sense would write JSON."""
    vocabulary = json.loads((base_folder / "tokenizer.json").read_text())["model"]["vocab"]
    return json.dumps({number: -100 for token, number in vocabulary.items() if set(token) <= set(SPACES)})


def ran(command: list[str | Path], folder: Path | None = None) -> Any:
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False, cwd=folder)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize(
    "sdk",
    [
        pytest.param("openai1", marks=pytest.mark.long),
        pytest.param("openai2", marks=pytest.mark.long),
        "openai3",
        "node",
    ],
)
def test_openai_s_sdk_is_answered(cluster: Cluster, bias: str, sdk: str, tmp_path: Path) -> None:
    url = f"{cluster.url}/v1"
    if sdk == "node":
        script = shutil.copy(SDKS / "ask_openai.mjs", tmp_path)
        (tmp_path / "node_modules").symlink_to(fetch_clients.fetch(sdk) / "node_modules")
        found = ran(["node", script, url, bias], tmp_path)
    else:
        python = sys.executable if sdk == "openai3" else fetch_clients.fetch(sdk)
        found = ran([python, SDKS / "ask_openai.py", url, bias])
        assert found["version"].startswith(f"{sdk[-1]}.")
    assert found["models"][0] == "smol"
    for model in ("smol", "forte"):
        _holds(found[model])
    assert found["unknown"] == "NotFoundError 404 model_not_found"
    assert found["wrong"] == "BadRequestError 400 invalid_request"


def _holds(found: dict[str, Any]) -> None:
    assert found["text"]["text"] == found["stream"]["text"] != ""
    for way in ("named", "required"):
        ((name, arguments),) = found[way]["calls"]
        assert (name, arguments["zone"] in ("utc", "cet")) == ("get_time", True)
    assert found["required"]["ended"] == "tool_calls"
    assert found["streamed"]["names"] == ["get_time"]
    assert found["streamed"]["arguments"] == found["named"]["calls"][0][1]
    assert found["auto"] == UTC
    assert found["auto, streamed"] == {
        "names": ["get_time"],
        "arguments": {"zone": "utc"},
        "text": "",
        "ended": "tool_calls",
    }
    assert found["long"] is True


@pytest.mark.long
def test_litellm_is_answered(cluster: Cluster, bias: str) -> None:
    python = fetch_clients.fetch("litellm")
    found = ran([python, SDKS / "ask_litellm.py", f"{cluster.url}/v1", bias])
    assert found["text"]
    assert found["stream"] == found["text"]
    ((name, arguments),) = found["named"]
    assert (name, arguments["zone"] in ("utc", "cet")) == ("get_time", True)
    assert found["unknown"] == "NotFoundError"
