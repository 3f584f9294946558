"""A real Prometheus for tests: it finds a cluster's processes as an operator's would."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

from testkit.redis_server import free_port


class Prometheus:
    """The real server, its targets discovered through GET /metrics/targets."""

    def __init__(self, folder: Path, targets_url: str, listen: str = "", inside: Sequence[str] = ()) -> None:
        """The server listens on `listen`, or on a free port here. `inside` is a command that runs it
        elsewhere."""
        self.url = f"http://{listen or f'127.0.0.1:{free_port()}'}"
        config = {
            "global": {"scrape_interval": "3s", "scrape_timeout": "3s"},
            "scrape_configs": [
                {
                    "job_name": "ostinato",
                    "http_sd_configs": [{"url": targets_url, "refresh_interval": "2s"}],
                }
            ],
        }
        (folder / "prometheus.yml").write_text(json.dumps(config))  # JSON is YAML
        with (folder / "prometheus.log").open("w") as log:
            self.process = subprocess.Popen(
                [
                    *inside,
                    _binary(),
                    f"--config.file={folder / 'prometheus.yml'}",
                    f"--storage.tsdb.path={folder / 'data'}",
                    f"--web.listen-address={self.url.removeprefix('http://')}",
                ],
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def query(self, expression: str) -> list[dict[str, Any]]:
        """An instant query's series; an empty answer fails, saying which targets could not be scraped."""
        reply = httpx.get(
            f"{self.url}/api/v1/query", params={"query": expression}, timeout=60, trust_env=False
        )
        assert reply.status_code == 200, reply.text
        found: list[dict[str, Any]] = reply.json()["data"]["result"]
        assert found, f"no series for {expression}; not scraped: {self.problems()}"
        return found

    def problems(self) -> list[tuple[str, str]]:
        """The targets that it could not scrape, with the reasons."""
        targets = httpx.get(f"{self.url}/api/v1/targets", timeout=60, trust_env=False).json()["data"]
        return [(t["scrapeUrl"], t["lastError"]) for t in targets["activeTargets"] if t["lastError"]]

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(120)


def _binary() -> str:
    found = shutil.which("prometheus")
    if found is None:
        pytest.fail("prometheus is missing; install it: apt-get install prometheus", pytrace=False)
    return found
