"""guidellm, which uses the first listed model if none is named."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from scripts import fetch_clients
from testkit.api.installations import Start


@pytest.mark.long
@pytest.mark.slow
def test_guidellm_benchmarks_the_base(start: Start, tmp_path: Path) -> None:
    """The first model is not a variant whose name comes first."""
    python, served = fetch_clients.fetch("guidellm"), start()
    served.up()
    assert served.register("a-variant", "base", "v1")["phase"] == "Ready"
    assert served.deploy("a-variant")["phase"] == "Deployed"
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("\n".join(json.dumps({"prompt": f"one two {number}"}) for number in range(5)))
    command: list[str | Path] = [python, "-m", "guidellm", "run", "--disable-console"]
    command += ["--backend", f"kind=openai_http,target={served.url}", "--profile", "kind=synchronous"]
    command += ["--constraint", "kind=max_requests,count=3", "--data", f"kind=json_file,path={prompts}"]
    command += ["--output", f"kind=json,path={tmp_path / 'report.json'}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    assert served.counts() == {("base", "ok"): 3}
