"""The cost of a compression."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from profiler.checkpoint import read_model
from testkit import random_variants as make
from workers.compression.result import Result, result_of


def result_on(device: str, base: Path) -> Result:
    return result_of(base, None, read_model(base), [], 0, 1.0, device)


def test_memory_is_that_of_the_device_that_computed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two GPUs, of which torch's current one is the first; a job on the CPU took no memory of them."""
    base = make.write_tiny_base(tmp_path / "base")
    peaks = {None: 111, "cuda": 111, "cuda:0": 111, "cuda:1": 222}

    def peak(device: str | None = None) -> int:
        return peaks[device]

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", peak)
    for device, expected in (("cuda:1", 222), ("cuda:0", 111), ("cuda", 111), ("cpu", 0)):
        assert result_on(device, base).peak_device_bytes == expected
