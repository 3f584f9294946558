"""Every kernel of engines and of compression, compiled for an H200 without one: CPU seconds, registers,
spills.

    python -m benchmarks.kernels.compiling

The kernels' own host code is run on tensors without memory, and what it would launch is compiled.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from benchmarks import rehearsing
from workers.kernels import bias, boft, full, low_rank, nvrtc, sparse_delta, svd_delta
from workers.kernels.bias import kernel as bias_kernel
from workers.kernels.boft import kernel as boft_kernel
from workers.kernels.column_loop import MAX_COLUMNS
from workers.kernels.column_loop import kernel as column_kernel
from workers.kernels.full import kernel as full_kernel
from workers.kernels.lora import kernel as lora_kernel
from workers.kernels.lora import layout as lora_layout
from workers.kernels.lora.plan import Scratch as LoraScratch
from workers.kernels.lora.plan import plan as lora_plan
from workers.kernels.rows import Rows
from workers.kernels.sparse_delta import kernel as sparse_kernel
from workers.kernels.sparse_delta import merged_rows, tensor_cores
from workers.kernels.svd_delta import kernel as svd_kernel
from workers.kernels.svd_delta import layout as svd_layout
from workers.kernels.svd_delta import tensor_cores as svd_cuda
from workers.kernels.svd_delta.plan import Scratch as SvdScratch
from workers.kernels.svd_delta.plan import plan as svd_plan

H200 = GPUTarget("cuda", 90, 32)
TENSOR_CORES = "tensor_cores"
META, CPU = torch.device("meta"), torch.device("cpu")
SLOTS, MAX_ROWS, MAX_RANK, MAX_SVD_RANK = 8, 8192, 16, 2048
HIDDEN, WIDE, VOCABULARY = 4096, 11008, 32000  # Llama-2-7B
LINEARS = (
    (HIDDEN, (HIDDEN,) * 3),
    (HIDDEN, (HIDDEN,)),
    (HIDDEN, (WIDE,) * 2),
    (WIDE, (HIDDEN,)),
)
BATCHES = (8, 64, 1024)  # decoding small and large batches, and a prefill
TYPES = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.uint8: "u8",
    torch.int32: "i32",
    torch.int64: "i64",
}


@dataclass(frozen=True)
class Launch:
    """One specialisation: a kernel with its arguments' types, its constants and its options."""

    operation: str
    function: Any
    signature: tuple[tuple[str, str], ...]
    constants: tuple[tuple[str, Any], ...]
    aligned: tuple[int, ...]  # arguments that are multiples of 16
    options: tuple[tuple[str, Any], ...]

    @property
    def name(self) -> str:
        return f"{self.operation}.{self.function.__name__}"


@dataclass(frozen=True)
class Compiled:
    name: str
    seconds: float
    registers: int
    spilled_bytes: int  # of a thread's stack
    shared_bytes: int
    constants: str


def launches(dtype: torch.dtype = torch.bfloat16) -> list[Launch]:
    """The kernels that serve a Llama-2-7B, and that compress a fine-tune, each specialisation once."""
    found: dict[Launch, None] = {}
    for operation, launch in _operations(dtype):
        with _recorded(operation, found):
            launch()
    return list(found)


def _cpu_s() -> float:
    """CPU time of this process and of the children it waited for: other work on the machine does not
    count."""
    spent = os.times()
    return spent.user + spent.system + spent.children_user + spent.children_system


def compiled(launch: Launch) -> Compiled:
    at = {name: index for index, name in enumerate(launch.function.arg_names)}
    source = ASTSource(
        launch.function,
        dict(launch.signature),
        {(at[name],): value for name, value in launch.constants},
        {(index,): [["tt.divisibility", 16]] for index in launch.aligned},
    )
    begun = _cpu_s()
    kernel = triton.compile(source, target=H200, options=dict(launch.options))
    seconds = _cpu_s() - begun
    constants = ", ".join(f"{name}={value}" for name, value in launch.constants)
    used = _registers_and_stack(kernel.asm["cubin"])
    return Compiled(launch.name, round(seconds, 1), *used, kernel.metadata.shared, constants)


def on_tensor_cores() -> Iterator[Compiled]:
    """The kernels that NVRTC compiles: the product of sparse deltas on sparse tensor cores, and
    singular-value deltas."""
    sparse = sparse_delta.__name__
    for dtype in tensor_cores.DTYPES:
        for config in tensor_cores.CONFIGS:
            yield _by_nvrtc(sparse, config.kernel, config.options(dtype), config.shared_bytes)
        yield _by_nvrtc(sparse, "merge", tensor_cores.options(dtype), 0)
        yield _by_nvrtc(sparse, "merged_rows", merged_rows.options(dtype), merged_rows.SHARED_BYTES)
        for each in dict.fromkeys(each for cut in svd_cuda.CUTS for each in (cut.shrink, cut.expand)):
            yield _by_nvrtc(svd_delta.__name__, each.kernel, each.options(dtype), each.shared_bytes)


def _by_nvrtc(package: str, name: str, options: tuple[str, ...], shared_bytes: int) -> Compiled:
    begun = _cpu_s()
    cubin = nvrtc.compiled(package, f"{name}.cu", tensor_cores.ARCHITECTURE, options)
    seconds, used = round(_cpu_s() - begun, 1), _registers_and_stack(cubin)
    return Compiled(f"{TENSOR_CORES}.{name}", seconds, *used, shared_bytes, " ".join(options))


def _registers_and_stack(cubin: bytes) -> tuple[int, int]:
    """Memory of a thread; stack is where registers are spilled to, in bytes."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    counts = {key: int(count) for key, count in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", usage)}
    return counts["REG"], counts["STACK"] + counts["LOCAL"]


def _operations(dtype: torch.dtype) -> Iterator[tuple[str, Callable[[], None]]]:
    rows = Rows(MAX_ROWS, SLOTS, CPU)
    rows.update(np.zeros(MAX_ROWS, np.int32))
    arena = torch.empty(1 << 20, dtype=torch.uint8, device=META)
    lora_scratch = LoraScratch(MAX_ROWS, SLOTS, 3 * MAX_RANK, META)
    svd_scratch = SvdScratch(MAX_ROWS, MAX_SVD_RANK, META, max_slices=3)

    def values(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=META)

    def table(width: int) -> torch.Tensor:
        return torch.empty(SLOTS, width, dtype=torch.int64, device=META)

    def of_linear(
        count: int, inputs: int, slices: tuple[int, ...]
    ) -> Iterator[tuple[str, Callable[[], None]]]:
        x, out = values(count, inputs), values(count, sum(slices))
        tiles, many = rows.tiles(count), len(slices)

        def lora() -> None:
            cut, kept = (
                lora_plan(tiles.block, inputs, lora_scratch.max_rank),
                table(lora_layout.width(many)),
            )
            lora_kernel.shrink(x, arena, kept, tiles, cut, lora_scratch)
            lora_kernel.expand(out, arena, kept, tiles, slices, cut, lora_scratch)

        def svd() -> None:
            cut, kept = svd_plan(tiles.block), table(svd_layout.width(many))
            svd_kernel.shrink(x, arena, kept, tiles, cut, svd_scratch)
            svd_kernel.expand(out, arena, kept, tiles, slices, cut, svd_scratch)

        def sparse() -> None:
            sparse_kernel.apply(x, out, arena, table(sparse_delta.width(many)), rows, slices)

        def rotations() -> None:
            kept = table(boft.width(many))
            boft_kernel.rotate(x, values(many, count, inputs), arena, kept, rows, 0, 3)
            boft_kernel.rescale(out, None, arena, kept, rows, slices)

        def biases() -> None:
            bias_kernel.apply(out, None, arena, table(bias.WIDTH), rows)

        yield from (
            ("lora", lora), ("svd_delta", svd), ("sparse_delta", sparse), ("boft", rotations),
            ("bias", biases),
        )  # fmt: skip

    def of_whole(count: int) -> Callable[[], None]:
        def launch() -> None:
            kept, x, ids = (
                table(full.WIDTH),
                values(count, HIDDEN),
                torch.empty(count, dtype=torch.int64, device=META),
            )
            full_kernel.norm(x, values(count, HIDDEN), 1e-5, arena, kept, rows)
            full_kernel.embed(ids, x, 0, arena, kept, rows)
            full_kernel.head(x, values(count, VOCABULARY), arena, kept, rows)

        return launch

    def of_columns(outputs: int, inputs: int, bits: int) -> Callable[[], None]:
        def some(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
            return torch.empty(shape, dtype=dtype, device=META)

        def launch() -> None:
            size = min(inputs, MAX_COLUMNS)
            work, kept = some(size, outputs), some(size, outputs, dtype=torch.bool)
            answers, scales = some(inputs, inputs)[:size, :size], some(outputs, dtype=torch.float16)
            column_kernel.apply(work, kept, some(size, outputs), some(size, 1), answers, scales, bits)

        return launch

    for count in BATCHES:
        for inputs, slices in LINEARS:
            yield from of_linear(count, inputs, slices)
        yield "full", of_whole(count)
    for outputs, inputs, bits in itertools.product((HIDDEN, WIDE, 72 + 1), (HIDDEN, 72 + 4), (4, 2)):
        yield "column_loop", of_columns(outputs, inputs, bits)


@contextmanager
def _recorded(operation: str, found: dict[Launch, None]) -> Iterator[None]:
    """Within, launches are written down and not made; as on a Hopper, they may depend on one another."""

    def record(self: Any, *args: Any, grid: Any, warmup: bool, **named: Any) -> None:
        names = self.arg_names
        given = {**dict(zip(names, args, strict=False)), **{k: v for k, v in named.items() if k in names}}
        signature, constants, aligned = {}, {}, []
        for index, parameter in enumerate(self.params):
            value = given[parameter.name]
            kind = "constexpr" if parameter.is_constexpr or value is None else _type(value)
            special = (
                isinstance(value, int) and not isinstance(value, bool) and not parameter.do_not_specialize
            )
            if special and value == 1:
                kind = "constexpr"
            signature[parameter.name] = kind
            if kind == "constexpr":
                constants[parameter.name] = value
            elif kind.startswith("*") or (special and value % 16 == 0):
                aligned.append(index)
        options = {name: value for name, value in named.items() if name not in names}
        launch = Launch(
            operation, self, tuple(signature.items()), tuple(constants.items()), tuple(aligned),
            tuple(options.items()),
        )  # fmt: skip
        found[launch] = None

    kept = JITFunction.run, low_rank.dependent_launches
    JITFunction.run = record
    low_rank.dependent_launches = lambda device: True  # type: ignore[assignment]
    try:
        yield
    finally:
        JITFunction.run, low_rank.dependent_launches = kept


def _type(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return "*" + TYPES[value.dtype]
    if isinstance(value, float):
        return "fp32"
    return "i32" if -(1 << 31) <= value < 1 << 31 else "i64"


def main() -> None:
    only = sys.argv[1:]
    triton_kernels = (compiled(each) for each in launches() if not only or each.operation in only)
    cuda_kernels = on_tensor_cores() if not only or TENSOR_CORES in only else ()
    for found in itertools.chain(triton_kernels, cuda_kernels):
        print(json.dumps(asdict(found)), flush=True)


def rehearse(folder: Path) -> None:
    """The cheapest operation, in a process that does not interpret kernels; nothing is taken from a cache."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    printed = subprocess.run(
        [sys.executable, "-m", "benchmarks.kernels.compiling", "bias"],
        env={**environment, "TRITON_CACHE_DIR": str(folder)},
        stdout=subprocess.PIPE,
        check=True,
    ).stdout
    kernels = [json.loads(line) for line in printed.splitlines()]
    assert kernels
    assert all(kernel["registers"] > 0 for kernel in kernels)


if __name__ == "__main__":
    rehearsing.run(main, rehearse)
