"""Variants that the running engine of their base cannot load: each ends with the reason, and others are
served."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open

from testkit import random_adapters
from testkit.cluster.clusters import GIVE_UP_S, Cluster, until
from testkit.cluster.refusing import asked_meanwhile, ostinato, refused, refused_when_read_again, register
from testkit.cluster.served import BASE
from testkit.random_adapters import ATTENTION, RandomLora
from testkit.random_variants import RandomDelta, write_delta

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3000)]

NAN_TENSOR = "base_model.model.model.layers.2.self_attn.v_proj.lora_B.weight"
TORN_FILE = "layer-00002.safetensors"


@pytest.fixture(scope="module")
def lora(base_folder: Path, adapters: dict[str, Path]) -> Path:
    folder = adapters["spare"].parent / "damaged"
    return random_adapters.write(
        base_folder, folder, RandomLora("damaged", rank=4, seed=21, modules=ATTENTION)
    )


@pytest.fixture(scope="module")
def delta(base_folder: Path, adapters: dict[str, Path]) -> Path:
    """One that fits into what the engine set aside for LoRAs."""
    folder = adapters["spare"].parent / "torn"
    return write_delta(base_folder, folder, RandomDelta("torn", 5, "sparse", 2, full=False))


@pytest.fixture(autouse=True)
def forgotten(cluster: Cluster) -> Iterator[None]:
    """Models that a test registered and deployed are gone after it, however it ended: others use the same
    cluster."""
    before = {model["model"] for model in cluster.get("/models")["models"]}
    yield
    for calls in ("deployments", "models"):
        for name in {view["model"] for view in cluster.get(f"/{calls}")[calls]} - before:
            cluster.perform("DELETE", f"/{calls}/{name}")


@contextmanager
def restored(path: Path) -> Iterator[bytes]:
    """The contents of the file, which it has again afterwards."""
    sound = path.read_bytes()
    try:
        yield sound
    finally:
        path.write_bytes(sound)


@contextmanager
def damaged(path: Path, at: int, value: bytes) -> Iterator[None]:
    """The file with these bytes in it; as it was afterwards."""
    with restored(path) as sound:
        path.write_bytes(sound[:at] + value + sound[at + len(value) :])
        yield


def with_nan(folder: Path) -> Any:
    """A NaN as the very first value of one of a LoRA's tensors."""
    path = folder / "adapter_model.safetensors"
    with safe_open(path, "np") as file:
        value = file.get_slice(NAN_TENSOR)[:1, :1].tobytes()
    at = path.read_bytes().index(value)
    return damaged(path, at, np.float32(math.nan).tobytes())


def with_flipped_byte(folder: Path) -> Any:
    path = folder / TORN_FILE
    at = path.stat().st_size * 2 // 3
    return damaged(path, at, bytes([path.read_bytes()[at] ^ 0x10]))


@pytest.fixture
def others(cluster: Cluster) -> Iterator[None]:
    with asked_meanwhile(cluster):
        yield


@pytest.mark.usefixtures("others")
def test_values_that_are_not_finite(cluster: Cluster, lora: Path) -> None:
    """Refused at registration; when they come later, at the deployment, in every way to ask for one."""
    load = {"lora_name": "damaged", "lora_path": str(lora), "base_model_name": BASE}
    named = f"{NAN_TENSOR} has a value that is not finite at [0, 0]"
    with with_nan(lora):
        begun = cluster.submit("POST", "/register_model", {"model": "d", "base": BASE, "adapter": str(lora)})
        until(lambda: cluster.get(f"/operations/{begun}")["done"], "the end of a registration")
        error = cluster.get(f"/operations/{begun}")["error"]["error"]
        assert (error["code"], named in error["message"]) == ("source_unreadable", True)
        reply = cluster.http.post("/v1/load_lora_adapter", json=load)
        assert (reply.status_code, named in reply.text) == (400, True)
    register(cluster, "damaged", lora)
    with with_nan(lora):
        error = refused(cluster, "damaged")
        assert (error["code"], error["param"]) == ("source_unreadable", "adapter")
        assert named in error["message"]
        assert "; train or compress the variant again" in error["message"]
        ended = ostinato(cluster, "deploy", "damaged")
        assert (ended.returncode, ended.stdout) == (1, "")
        assert named in ended.stderr
        assert "Hint:  train or compress the variant again" in ended.stderr
        assert named in ostinato(cluster, "operations").stdout
    cluster.perform("POST", "/deploy_model", {"model": "damaged", "maxOutputLength": 16})  # it is mended
    with with_nan(lora):  # what was read serves from memory
        body = {"model": "damaged", "prompt": "Hello", "max_tokens": 2}
        assert cluster.http.post("/v1/completions", json=body).status_code == 200
        cluster.perform("DELETE", "/deployments/damaged")
        assert named in refused_when_read_again(cluster, "damaged")["message"]


@pytest.mark.usefixtures("others")
def test_a_delta_with_changed_bytes_is_refused(cluster: Cluster, delta: Path) -> None:
    """The file was flipped, cut or removed after its registration. The others can be deployed again."""
    register(cluster, "torn", delta)
    with with_flipped_byte(delta):
        error = refused(cluster, "torn")
        assert error["code"] == "source_unreadable"
        assert f"{TORN_FILE} is corrupt: expected SHA-256" in error["message"]
        assert "copy it again" in error["message"]
    path = delta / TORN_FILE
    with restored(path) as sound:
        path.write_bytes(sound[: len(sound) // 2])
        assert TORN_FILE in refused(cluster, "torn")["message"]
        path.unlink()
        assert TORN_FILE in refused(cluster, "torn")["message"]
    cluster.perform("POST", "/deploy_model", {"model": "torn", "maxOutputLength": 16})


def test_other_variants_are_deployed_again_when_one_is_damaged(
    cluster: Cluster, lora: Path, adapters: dict[str, Path]
) -> None:
    register(cluster, "damaged", lora)
    cluster.serve_variant("steady", BASE, adapters["spare"], 16)
    with with_nan(lora):
        refused(cluster, "damaged")
        cluster.perform("DELETE", "/deployments/steady")
        cluster.perform("POST", "/deploy_model", {"model": "steady", "maxOutputLength": 16})
        body = {"model": "steady", "prompt": "Hello", "max_tokens": 2}
        assert cluster.http.post("/v1/completions", json=body).status_code == 200


@pytest.mark.usefixtures("others")
def test_a_delta_that_needs_more_memory_than_was_set_aside(cluster: Cluster, large_delta: Path) -> None:
    """The base was deployed before the delta was registered."""
    load = {"lora_name": "large", "lora_path": str(large_delta), "base_model_name": BASE}
    reply = cluster.http.post("/v1/load_lora_adapter", json=load, timeout=GIVE_UP_S)
    error = reply.json()["error"]
    assert (reply.status_code, error["code"]) == (422, "adapter_mismatch")
    assert "bytes on this rank, but only" in error["message"]
    assert all(m["model"] != "large" for m in cluster.get("/models")["models"])
    register(cluster, "large", large_delta)
    error = refused(cluster, "large")
    assert error["code"] == "adapter_mismatch"
    assert "`ostinato tune BASE --place-anew`" in error["message"]
    assert "undeploy its base and deploy it again" in error["message"]
    ended = ostinato(cluster, "--json", "deploy", "large")
    assert ended.returncode == 1
    assert json.loads(ended.stderr)["error"]["message"] == error["message"]


def test_an_engine_s_log_is_readable_at_once(cluster: Cluster) -> None:
    log = cluster.http.get(f"/deployments/{BASE}/logs").text
    assert f"engine of {BASE} is ready" in log
