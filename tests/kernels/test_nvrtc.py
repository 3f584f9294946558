"""The hand-over of a kernel's parameters to the driver, as ctypes lays them out. Needs no GPU."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest

from workers.kernels.nvrtc import Dependent, Parameters, _configured

TYPES: dict[str, Any] = {"P": ctypes.c_void_p, "q": ctypes.c_int64, "i": ctypes.c_int}


@pytest.mark.parametrize("formats", ["PPPPPPqqiii", "PPPPqii", "i", "iPiqiP"])
def test_each_pointer_leads_to_its_value(formats: str) -> None:
    parameters, five = Parameters((*formats, "5i")), (3, 11, 22, 33, 44)
    values = [2**40 + i if kind != "i" else -7 - i for i, kind in enumerate(formats)]
    for _ in range(2):  # they lie where they lay before
        values = [value + 1 for value in values]
        parameters.set((*values, *five))
        pointers = (ctypes.c_void_p * (len(formats) + 1)).from_address(parameters.address)
        found = [TYPES[kind].from_address(pointers[i] or 0).value for i, kind in enumerate(formats)]
        assert found == values
        assert tuple((ctypes.c_int * 5).from_address(pointers[-1] or 0)) == five
        for kind, pointer in zip(formats, pointers, strict=False):
            assert (pointer or 0) % ctypes.alignment(TYPES[kind]) == 0


def test_a_dependent_launch_has_its_attribute_and_its_cluster_size() -> None:
    driver = pytest.importorskip("cuda.bindings.driver", reason="has the forms of launches")
    names = driver.CUlaunchAttributeID
    for cluster in (1, 2):
        made = _configured(Dependent(cluster), (6, 5), 256, 1000)
        assert (made.gridDimX, made.gridDimY, made.gridDimZ) == (6, 5, 1)
        assert (made.blockDimX, made.blockDimY, made.blockDimZ) == (256, 1, 1)
        assert made.sharedMemBytes == 1000
        kept = {each.id: each.value for each in made.attrs}
        assert made.numAttrs == len(kept) == cluster
        early = kept[names.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION]
        assert early.programmaticStreamSerializationAllowed == 1
        if cluster > 1:
            found = kept[names.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION].clusterDim
            assert (found.x, found.y, found.z) == (cluster, 1, 1)
