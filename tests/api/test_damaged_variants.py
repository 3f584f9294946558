"""A delta with a wrong byte, or a part of a file: refused by the file's name, however it is registered."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from profiler.checkpoint import read_model
from testkit import checkpoints as make
from testkit.api.installations import Installation
from testkit.variant_folders import CONFIG, write_delta

FILE = "layer-00001.safetensors"


@pytest.fixture
def delta(files: Path) -> Iterator[Path]:
    """The delta lies in a folder that sources may be read from, next to its base."""
    folder = files / "damaged"
    rng = np.random.default_rng(0)
    shapes = make.tensors(CONFIG, qkv_bias=True)
    weights = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    yield write_delta(folder / "d", read_model(make.write_model(folder / "base", CONFIG, weights)))
    shutil.rmtree(folder)


def flipped(raw: bytes) -> bytes:
    return raw[:-1] + bytes([raw[-1] ^ 0x10])


def cut(raw: bytes) -> bytes:
    return raw[:-3]


@pytest.mark.parametrize("damage", [flipped, cut])
def test_a_damaged_delta_is_refused_by_its_file(
    fresh: Installation, delta: Path, damage: Callable[[bytes], bytes]
) -> None:
    base = fresh.post("/register_model", {"model": "base", "source": str(delta.parent / "base")})
    assert fresh.end(base)["phase"] == "Ready"
    assert fresh.deploy("base", maxOutputLength=16)["phase"] == "Deployed"
    sound = (delta / FILE).read_bytes()
    (delta / FILE).write_bytes(damage(sound))

    ended = fresh.end(fresh.post("/register_model", {"model": "d", "base": "base", "adapter": str(delta)}))
    assert (ended["phase"], ended["error"]["error"]["code"]) == ("Failed", "source_unreadable")
    reason = ended["error"]["error"]["message"]
    assert FILE in reason
    load = {"lora_name": "d", "lora_path": str(delta), "base_model_name": "base"}
    reply = fresh.post("/v1/load_lora_adapter", load)
    assert (reply.status_code, reply.json()["error"]["message"]) == (400, reason)
    command = [sys.executable, "-c", "from controlplane.cli.main import main; main()", "--url", fresh.url]
    told = subprocess.run(
        [*command, "register", "d", "--base", "base", "--adapter", str(delta)],
        check=False,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert (told.returncode, told.stdout) == (1, "")
    assert FILE in told.stderr

    (delta / FILE).write_bytes(sound)
    assert fresh.post("/v1/load_lora_adapter", load).status_code == 200
