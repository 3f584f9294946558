"""A bundled model that could not be converted, as its task tells: a full disk is nobody's mistake."""

from __future__ import annotations

import numpy as np
import pytest
from ray.exceptions import RayTaskError
from safetensors.numpy import save_file

from controlplane import errors
from controlplane.runtime.cluster import not_converted


def task_error(cause: Exception) -> RayTaskError:
    return RayTaskError("ensure", "a traceback", cause)


def written_to_a_full_disk(by: str) -> Exception:
    """The kernel's device that is always full."""
    try:
        if by == "safetensors":
            save_file({"a": np.zeros(10_000)}, "/dev/full")
        else:
            with open("/dev/full", "wb") as file:
                file.write(bytes(10_000))
                file.flush()
    except Exception as e:
        return e
    raise AssertionError("/dev/full took it")


@pytest.mark.parametrize("by", ["Python", "safetensors"])
def test_a_full_disk_is_no_fault_of_the_request(by: str) -> None:
    found = not_converted("m", task_error(written_to_a_full_disk(by)))
    assert isinstance(found, errors.Unavailable)
    assert "no space left" in found.message
    assert "/dev/full" not in found.message


@pytest.mark.parametrize("cause", [FileNotFoundError(2, "No such file", "x"), ValueError("torn")])
def test_other_faults_are_the_sources(cause: Exception) -> None:
    assert isinstance(not_converted("m", task_error(cause)), errors.SourceUnreadable)
