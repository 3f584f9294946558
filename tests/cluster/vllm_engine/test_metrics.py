"""What an operator sees: a real Prometheus that finds and scrapes every process, and Ray's dashboard."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from clusters import Cluster, until

from tests.conftest import free_port

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

BASE = "smol"


class Prometheus:
    """The real server, its targets discovered through GET /metrics/targets."""

    def __init__(self, folder: Path, targets_url: str) -> None:
        self.url = f"http://127.0.0.1:{free_port()}"
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
            f"{self.url}/api/v1/query", params={"query": expression}, timeout=5, trust_env=False
        )
        assert reply.status_code == 200, reply.text
        found: list[dict[str, Any]] = reply.json()["data"]["result"]
        assert found, f"no series for {expression}; not scraped: {self.problems()}"
        return found

    def problems(self) -> list[tuple[str, str]]:
        """Targets it could not scrape, and why."""
        targets = httpx.get(f"{self.url}/api/v1/targets", timeout=5, trust_env=False).json()["data"]
        return [(t["scrapeUrl"], t["lastError"]) for t in targets["activeTargets"] if t["lastError"]]

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(15)


def _binary() -> str:
    found = shutil.which("prometheus")
    if found is None:
        pytest.fail("prometheus is missing; install it: apt-get install prometheus", pytrace=False)
    return found


@pytest.fixture(scope="module")
def prometheus(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    server = Prometheus(tmp_path_factory.mktemp("prometheus"), f"{cluster.url}/metrics/targets")
    yield server
    server.stop()


def test_prometheus_sees_requests_and_the_engine(
    cluster: Cluster, client: openai.OpenAI, prometheus: Prometheus
) -> None:
    started = time.monotonic()
    client.completions.create(model="smol:piano", prompt="Hello", max_tokens=2)
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="nobody", prompt="Hello", max_tokens=2)
    requests = until(
        lambda: prometheus.query('ostinato_requests_total{model="piano",code="ok"}'),
        60,
        "ostinato_requests_total",
        every_s=0.5,
    )
    engine = until(
        lambda: prometheus.query("vllm:num_requests_running"), 60, "vllm:num_requests_running", every_s=0.5
    )
    print(f"\nboth series in Prometheus {time.monotonic() - started:.1f} s after it was started")
    assert float(requests[0]["value"][1]) >= 1
    assert requests[0]["metric"]["component"] == "gateway"
    assert engine[0]["metric"]["component"] == f"engine-{BASE}"
    assert engine[0]["metric"]["model_name"] == BASE
    unknown = prometheus.query('ostinato_requests_total{code="model_not_found"}')
    assert {series["metric"]["model"] for series in unknown} == {"unknown"}, "labels must stay bounded"


def test_every_process_is_scraped(prometheus: Prometheus) -> None:
    def all_up() -> bool:
        up = {s["metric"]["component"]: s["value"][1] for s in prometheus.query("up")}
        assert up == {"gateway": "1", "controller": "1", f"engine-{BASE}": "1"}
        return True

    until(all_up, 60, "every process scraped", every_s=0.5)


def test_the_controller_counts_its_records(prometheus: Prometheus) -> None:
    def counted() -> bool:
        found = prometheus.query('ostinato_deployments{phase="Deployed"}')
        return float(found[0]["value"][1]) == 3

    until(counted, 60, "three deployments", every_s=0.5)


def test_the_dashboard_lists_the_applications(cluster: Cluster) -> None:
    """Its first answer can take long: it starts an actor to ask Serve."""
    url = f"{cluster.local.dashboard_url}/api/serve/applications/"

    def listed() -> bool:
        reply = httpx.get(url, timeout=60, trust_env=False)
        assert reply.status_code == 200, reply.text
        states = {name: app["status"] for name, app in reply.json()["applications"].items()}
        assert states == {"ostinato": "RUNNING", f"model-{BASE}": "RUNNING"}
        return True

    until(listed, 120, "the dashboard's list")
