"""CUDA C++ kernels for work that Triton cannot express.

NVRTC compiles them at first use; they run on torch's stream. NVRTC and the driver are called through
`cuda.bindings`, which torch's CUDA builds include.
"""

from __future__ import annotations

import ctypes
import functools
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

import torch


class Parameters:
    """The memory of a kernel's parameters at its launch, made once: making it takes longer than a launch.

    `formats`: each parameter's format, as in `struct`: P, q, i, or 5i for a structure of five.
    """

    def __init__(self, formats: Sequence[str]) -> None:
        self._packed = struct.Struct("@" + "".join(formats))
        self._memory = (ctypes.c_char * self._packed.size)()
        before = ("".join(formats[:i]) for i in range(len(formats)))
        starts = [struct.calcsize(f"@{b}0{f[-1]}") for b, f in zip(before, formats, strict=True)]
        first = ctypes.addressof(self._memory)
        self._pointers = (ctypes.c_void_p * len(formats))(*(first + start for start in starts))
        self.address = ctypes.addressof(self._pointers)

    def set(self, values: Sequence[int]) -> None:
        self._packed.pack_into(self._memory, 0, *values)


@dataclass(frozen=True)
class Kernel:
    """A compiled function that is loaded on a device, its shared memory per block, and its parameters.

    Only one thread at a time may launch it.
    """

    function: Any
    shared_bytes: int
    parameters: Parameters
    device: int


def compiled(package: str, file: str, architecture: str, options: Sequence[str]) -> bytes:
    """Compile `file` of `package` to machine code (cubin) for `architecture`, such as sm_90a; needs no GPU.

    The file may include the headers of its package and those in this module's folder.

    Raises RuntimeError with the compiler's message.
    """
    from cuda.bindings import nvrtc

    folder = files(package)
    headers = {
        header.name.encode(): header.read_bytes()
        for place in (files(__package__), folder)
        for header in place.iterdir()
        if header.name.endswith(".cuh")
    }
    included = len(headers), list(headers.values()), list(headers)
    source = folder.joinpath(file).read_bytes()
    program = checked(nvrtc.nvrtcCreateProgram(source, file.encode(), *included))
    arguments = [f"--gpu-architecture={architecture}", "--std=c++17", *options]
    try:
        result = nvrtc.nvrtcCompileProgram(program, len(arguments), [a.encode() for a in arguments])
        if int(result[0]) != 0:
            log = bytearray(checked(nvrtc.nvrtcGetProgramLogSize(program)))
            checked(nvrtc.nvrtcGetProgramLog(program, log))
            said = log.decode(errors="replace").strip("\0 \n")
            raise RuntimeError(f"{file} could not be compiled for {architecture}: {said}")
        cubin = bytearray(checked(nvrtc.nvrtcGetCUBINSize(program)))
        checked(nvrtc.nvrtcGetCUBIN(program, cubin))
        return bytes(cubin)
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def kernel(
    package: str,
    file: str,
    name: str,
    architecture: str,
    options: Sequence[str],
    shared_bytes: int,
    formats: Sequence[str],
) -> Kernel:
    """Load the function `name` on the current device; `formats` as in `Parameters`.

    Raises ImportError without `cuda.bindings`, and RuntimeError.
    """
    from cuda.bindings import driver

    module = checked(driver.cuModuleLoadData(compiled(package, file, architecture, options)))
    function = checked(driver.cuModuleGetFunction(module, name.encode()))
    most = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    checked(driver.cuFuncSetAttribute(function, most, shared_bytes))
    return Kernel(function, shared_bytes, Parameters(formats), torch.cuda.current_device())


@dataclass(frozen=True)
class Dependent:
    """A launch that may begin before earlier launches have ended, in clusters of `cluster` blocks.

    The kernel itself waits for earlier launches if it depends on them (`griddepcontrol`).
    """

    cluster: int = 1


def launch(
    made: Kernel,
    grid: tuple[int, int],
    threads: int,
    arguments: Sequence[int],
    dependent: Dependent | None = None,
) -> None:
    """Launch the kernel on torch's current stream of its device; CUDA graphs capture it.

    Raises RuntimeError.
    """
    from cuda.bindings import driver

    made.parameters.set(arguments)
    # torch.cuda.current_stream() builds an object, which takes longer than the launch.
    stream = torch._C._cuda_getCurrentRawStream(made.device)
    if dependent is not None:
        configured = _configured(dependent, grid, threads, made.shared_bytes)
        configured.hStream = stream
        checked(driver.cuLaunchKernelEx(configured, made.function, made.parameters.address, 0))
        return
    checked(
        driver.cuLaunchKernel(
            made.function,
            *grid,
            1,
            threads,
            1,
            1,
            made.shared_bytes,
            stream,
            made.parameters.address,
            0,
        )
    )


@functools.lru_cache(maxsize=256)
def _configured(dependent: Dependent, grid: tuple[int, int], threads: int, shared_bytes: int) -> Any:
    from cuda.bindings import driver

    names = driver.CUlaunchAttributeID
    early = driver.CUlaunchAttribute()
    early.id = names.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    early.value.programmaticStreamSerializationAllowed = 1
    attributes = [early]
    if dependent.cluster > 1:
        clusters = driver.CUlaunchAttribute()
        clusters.id = names.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
        clusters.value.clusterDim.x = dependent.cluster
        clusters.value.clusterDim.y = clusters.value.clusterDim.z = 1
        attributes.append(clusters)
    made = driver.CUlaunchConfig()
    made.gridDimX, made.gridDimY, made.gridDimZ = *grid, 1
    made.blockDimX, made.blockDimY, made.blockDimZ = threads, 1, 1
    made.sharedMemBytes = shared_bytes
    made.attrs, made.numAttrs = attributes, len(attributes)
    return made


def checked(result: Sequence[Any]) -> Any:
    """The result of a CUDA call without its status; raises RuntimeError if the status is an error."""
    if int(result[0]) != 0:
        raise RuntimeError(f"{type(result[0]).__name__}: {result[0].name}")
    return result[1] if len(result) == 2 else None
