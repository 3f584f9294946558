"""Which GPUs of a host are read: those that are ours. One that falls off the bus is missed by itself."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest

from workers.agent import gpus
from workers.agent.gpus import Nvml
from workers.agent.sampling import gpu_samples

GIB = 1 << 30


class FakeDriver:
    """NVML of a host with three GPUs that are all joined; those in `lost` answer nothing."""

    def __init__(self) -> None:
        self.lost: set[int] = set()
        memory = SimpleNamespace(total=GIB, free=GIB)
        self.answers: dict[str, Callable[..., Any]] = {
            "nvmlInit": lambda: None,
            "nvmlDeviceGetCount": lambda: 3,
            "nvmlDeviceGetHandleByIndex": lambda index: index,
            "nvmlDeviceGetName": lambda index: f"GPU {index}",
            "nvmlDeviceGetUUID": lambda index: f"GPU-{'abb'[index]}{index}",
            "nvmlDeviceGetMemoryInfo": lambda index: memory,
            "nvmlDeviceGetUtilizationRates": lambda index: SimpleNamespace(gpu=0),
            "nvmlDeviceGetComputeRunningProcesses": lambda index: [],
            "nvmlDeviceGetGraphicsRunningProcesses": lambda index: [],
            "nvmlDeviceGetP2PStatus": lambda a, b, what: pynvml.NVML_P2P_STATUS_OK,
        }

    def __getattr__(self, name: str) -> Any:
        if name not in self.answers:
            return getattr(pynvml, name)

        def ask(*args: int) -> Any:
            if self.lost & set(args[:2]):
                raise pynvml.NVMLError_GpuIsLost()
            return self.answers[name](*args)

        return ask


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    fake = FakeDriver()
    monkeypatch.setattr(gpus, "pynvml", fake)
    monkeypatch.delenv(gpus.VISIBLE, raising=False)
    return fake


def seen(nvml: Nvml) -> list[int]:
    return [reading.index for reading in nvml.read()]


def test_the_others_are_read(driver: FakeDriver) -> None:
    nvml = Nvml()
    assert seen(nvml) == [0, 1, 2]
    assert nvml.linked == [(0, 1), (0, 2), (1, 2)]
    driver.lost = {1}
    assert seen(nvml) == [0, 2]
    samples = gpu_samples(nvml.read(), nvml.linked, {}, {})
    assert [(s.index, s.nvlink_domain) for s in samples] == [(0, 0), (2, 0)]
    driver.lost = set()
    assert seen(nvml) == [0, 1, 2]


def test_a_gpu_that_is_lost_from_the_start_is_read_once_it_is_there(driver: FakeDriver) -> None:
    driver.lost = {0}
    nvml = Nvml([0, 2])
    assert seen(nvml) == [2]
    driver.lost = set()
    assert seen(nvml) == [0, 2]
    assert nvml.linked == [(0, 2)]


def test_a_returned_gpu_is_read_again(driver: FakeDriver) -> None:
    nvml = Nvml()
    assert seen(nvml) == [0, 1, 2]
    driver.lost = {0, 1}
    assert seen(nvml) == [2]
    driver.lost = {0}
    assert seen(nvml) == [1, 2]
    assert nvml.linked == [(1, 2)]
    driver.lost = set()
    assert seen(nvml) == [0, 1, 2]
    assert nvml.linked == [(0, 1), (0, 2), (1, 2)]


def test_a_third_one_is_found_while_one_is_lost(driver: FakeDriver) -> None:
    nvml = Nvml()
    driver.lost = {1, 2}
    assert seen(nvml) == [0]
    driver.lost = {1}
    assert seen(nvml) == [0, 2]


def test_a_node_that_lost_all_gpus_is_not_a_node_without_gpus(driver: FakeDriver) -> None:
    nvml = Nvml()
    driver.lost = {0, 1, 2}
    with pytest.raises(pynvml.NVMLError_GpuIsLost):
        nvml.read()


def test_other_errors_are_errors(driver: FakeDriver) -> None:
    def fail(index: int) -> Any:
        raise pynvml.NVMLError_Unknown()

    driver.answers["nvmlDeviceGetMemoryInfo"] = fail
    with pytest.raises(pynvml.NVMLError_Unknown):
        Nvml().read()


@pytest.mark.parametrize(
    ("listed", "left"),
    [
        ("1", [1]),
        ("2,0", [0, 2]),
        (" 0 , 1 ", [0, 1]),
        ("", []),
        ("-1", []),
        ("NoDevFiles", []),
        ("0,3,1", [0]),  # CUDA reads no further
        ("GPU-a", [0]),
        ("GPU-b2,GPU-a0", [0, 2]),
        ("GPU-b,0", []),  # two begin so
        ("GPU-c", []),
    ],
)
def test_only_what_cuda_would_see_is_read(
    driver: FakeDriver, monkeypatch: pytest.MonkeyPatch, listed: str, left: list[int]
) -> None:
    monkeypatch.setenv(gpus.VISIBLE, listed)
    assert seen(Nvml()) == left
    assert seen(Nvml([0, 1])) == [0, 1]  # a setting says otherwise


def test_a_slice_of_a_gpu_is_refused(driver: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(gpus.VISIBLE, "MIG-5f1a")
    with pytest.raises(ValueError, match="'MIG-5f1a'; list whole GPUs in OSTINATO_GPUS"):
        Nvml()
