"""A bundled model that could not be converted, as its task reports: a full disk is no mistake of the user."""

from __future__ import annotations

import errno
import os

import pytest
from ray.exceptions import RayTaskError
from safetensors import SafetensorError

from controlplane import errors
from controlplane.runtime.ray_cluster import not_converted

WHERE = "/srv/home/models/m/model.safetensors"
FULL = [
    OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), WHERE),
    OSError(errno.EDQUOT, os.strerror(errno.EDQUOT), WHERE),
    # Rust's way to say so.
    SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)"),
]


def conversion_error(cause: Exception) -> errors.OstinatoError:
    return not_converted("m", RayTaskError("ensure", "a traceback", cause))


@pytest.mark.parametrize("cause", FULL, ids=repr)
def test_a_full_disk_is_no_fault_of_the_request(cause: Exception) -> None:
    found = conversion_error(cause)
    assert (type(found), found.status) == (errors.Unavailable, 503)
    assert "no space left" in found.message
    assert WHERE not in found.message


@pytest.mark.parametrize("cause", [FileNotFoundError(2, "No such file", "x"), ValueError("torn")])
def test_other_faults_are_the_sources(cause: Exception) -> None:
    assert isinstance(conversion_error(cause), errors.SourceUnreadable)
