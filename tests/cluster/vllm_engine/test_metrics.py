"""An operator's view: a real Prometheus that finds and scrapes every process."""

from __future__ import annotations

import time
from collections.abc import Iterator

import openai
import pytest

from testkit.cluster.clusters import Cluster, until
from testkit.cluster.scraping import Prometheus

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3000)]

BASE = "smol"


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
        "ostinato_requests_total",
        every_s=0.5,
    )
    engine = until(
        lambda: prometheus.query("vllm:num_requests_running"), "vllm:num_requests_running", every_s=0.5
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

    until(all_up, "every process scraped", every_s=0.5)


def test_the_controller_counts_its_records(prometheus: Prometheus) -> None:
    def counted() -> bool:
        found = prometheus.query('ostinato_deployments{phase="Deployed"}')
        return float(found[0]["value"][1]) == 3

    until(counted, "three deployments", every_s=0.5)
