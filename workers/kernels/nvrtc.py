"""CUDA C++ for what Triton cannot say: compiled by NVRTC when it is first needed, launched on torch's stream.

NVRTC and the driver are called through `cuda.bindings`, which torch's CUDA builds bring along.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

import torch

Argument = ctypes.Structure | ctypes.c_int | ctypes.c_int64 | ctypes.c_void_p


@dataclass(frozen=True)
class Kernel:
    """A compiled function that is loaded on a device, and the shared memory that a block of it takes."""

    function: Any
    shared_bytes: int


def compiled(package: str, file: str, architecture: str, options: Sequence[str]) -> bytes:
    """The machine code (cubin) of `file` in `package` for `architecture`, such as sm_90a. Needs no GPU.

    Raises RuntimeError with the compiler's words.
    """
    from cuda.bindings import nvrtc

    folder = files(package)
    headers = {h.name.encode(): h.read_bytes() for h in folder.iterdir() if h.name.endswith(".cuh")}
    included = len(headers), list(headers.values()), list(headers)
    source = folder.joinpath(file).read_bytes()
    program = _checked(nvrtc.nvrtcCreateProgram(source, file.encode(), *included))
    arguments = [f"--gpu-architecture={architecture}", "--std=c++17", *options]
    try:
        result = nvrtc.nvrtcCompileProgram(program, len(arguments), [a.encode() for a in arguments])
        if int(result[0]) != 0:
            log = bytearray(_checked(nvrtc.nvrtcGetProgramLogSize(program)))
            _checked(nvrtc.nvrtcGetProgramLog(program, log))
            said = log.decode(errors="replace").strip("\0 \n")
            raise RuntimeError(f"{file} could not be compiled for {architecture}: {said}")
        cubin = bytearray(_checked(nvrtc.nvrtcGetCUBINSize(program)))
        _checked(nvrtc.nvrtcGetCUBIN(program, cubin))
        return bytes(cubin)
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def kernel(
    package: str, file: str, name: str, architecture: str, options: Sequence[str], shared_bytes: int
) -> Kernel:
    """The function `name`, loaded on the current device. Raises ImportError where there is no
    `cuda.bindings`, and RuntimeError."""
    from cuda.bindings import driver

    module = _checked(driver.cuModuleLoadData(compiled(package, file, architecture, options)))
    function = _checked(driver.cuModuleGetFunction(module, name.encode()))
    most = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    _checked(driver.cuFuncSetAttribute(function, most, shared_bytes))
    return Kernel(function, shared_bytes)


def launch(made: Kernel, grid: tuple[int, int], threads: int, arguments: Sequence[Argument]) -> None:
    """On torch's current stream; graphs capture it. Raises RuntimeError."""
    from cuda.bindings import driver

    addresses = (ctypes.c_void_p * len(arguments))(*map(ctypes.addressof, arguments))
    stream = torch.cuda.current_stream().cuda_stream
    _checked(
        driver.cuLaunchKernel(
            made.function,
            *grid,
            1,
            threads,
            1,
            1,
            made.shared_bytes,
            stream,
            ctypes.addressof(addresses),
            0,
        )
    )


def _checked(result: Sequence[Any]) -> Any:
    """What a call gave back besides its status."""
    if int(result[0]) != 0:
        raise RuntimeError(f"{type(result[0]).__name__}: {result[0].name}")
    return result[1] if len(result) == 2 else None
