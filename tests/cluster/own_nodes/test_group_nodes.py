"""A group on two Ray nodes of this host: it starts, answers, dies and ends as one."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from controlplane.runtime import local, loopback
from controlplane.settings import Settings
from testkit import random_adapters
from testkit.cluster import small_models
from testkit.redis_server import free_port

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3000)]

DRIVER = Path(__file__).parents[1] / "group_driver.py"


@pytest.fixture
def nodes() -> Iterator[tuple[Settings, str]]:
    """Two raylets, called one and two; everything started below them bears the mark of `settings`."""
    home = Path(tempfile.mkdtemp(prefix="ost-", dir="/tmp"))
    settings = Settings(home=home)
    host = own_address()
    address = f"{host}:{free_port()}"
    common = [f"--node-ip-address={host}", "--num-cpus=2", "--object-store-memory=100000000"]
    head = ["--head", f"--port={address.rpartition(':')[2]}", "--include-dashboard=false"]
    try:
        _ray([*head, "--node-name=one", f"--temp-dir={home}/ray", *common], settings)
        _ray([f"--address={address}", "--node-name=two", *common], settings)
        yield settings, address
    finally:
        local.end_leftovers(settings, lambda message: None)
        shutil.rmtree(home, ignore_errors=True)


def own_address() -> str:
    """Ray has no clusters of several nodes on loopback."""
    own = [a.address for found in psutil.net_if_addrs().values() for a in found if a.family is socket.AF_INET]
    outward = [address for address in own if not address.startswith("127.")]
    assert outward, "this test needs a network interface beside loopback"
    return outward[0]


def environment_of(settings: Settings) -> dict[str, str]:
    """The settings of a local cluster, except those that keep it on loopback."""
    kept = local.cluster_environment(settings)
    local.make_folder(kept[local.MARK])
    return {name: value for name, value in kept.items() if name not in loopback.ENVIRONMENT}


def _ray(options: list[str], settings: Settings) -> None:
    environment = environment_of(settings)
    command = [*local.RAY, "start", "--disable-usage-stats", *options]
    done = subprocess.run(command, env=environment, capture_output=True, check=False)
    assert done.returncode == 0, done.stdout.decode() + done.stderr.decode()


def test_a_group_on_two_nodes_lives_and_dies_together(
    nodes: tuple[Settings, str], smollm2_folder: Path, tmp_path: Path
) -> None:
    settings, address = nodes
    model = small_models.fewer_tokens(
        small_models.first_layers(smollm2_folder, tmp_path / "model", 3), 16_384
    )
    done = subprocess.run(
        [sys.executable, str(DRIVER), address, str(model)],
        env={
            **environment_of(settings),
            "PYTHONPATH": str(DRIVER.parents[2]),
            "RAY_SERVE_THROUGHPUT_OPTIMIZED": "0",  # handles would need an event loop
        },
        capture_output=True,
        check=False,
        timeout=2300,
    )
    assert done.returncode == 0, done.stderr.decode()[-3000:]
    facts = json.loads(done.stdout.decode().splitlines()[-1])
    print(json.dumps(facts, indent=1))
    assert facts["ranks"] == [[0, "one", 1], [1, "two", 2]]
    prompt, tokens = facts["answer"]
    assert random_adapters.falls_short(random_adapters.merged_model(model, None), prompt, tokens) < 1e-4
    struck = facts["replica"]
    assert struck["left"] == [], "the group outlived its replica"
    assert struck["answer"] == facts["answer"]
    assert facts["left"] == []
