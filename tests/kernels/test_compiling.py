"""Every kernel of a Llama-2-7B's engine, and of its fine-tunes' compression, compiles for an H200: soon
enough, and without spilling registers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from workers.kernels import nvrtc, sparse_delta
from workers.kernels.sparse_delta import merged_rows, tensor_cores

MAX_SECONDS = 20  # on a slow and busy machine; see benchmarks/kernels/compiling.py for what it takes
# An engine's start waits for each of them; on tensor cores for half, those of its own type of floats.
MAX_SPECIALISATIONS = {"svd_delta": 4, "lora": 16, "sparse_delta": 9, "boft": 9, "tensor_cores": 26}


@cache
def compiled(operations: tuple[str, ...]) -> list[dict[str, Any]]:
    """In a process of its own: in this one, kernels are interpreted. Nothing is taken from a cache."""
    pytest.importorskip("triton", reason="Triton is what compiles the kernels")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    with tempfile.TemporaryDirectory() as folder:
        found = subprocess.run(
            [sys.executable, "-m", "benchmarks.kernels.compiling", *operations],
            env={**environment, "TRITON_CACHE_DIR": folder},
            cwd=Path(__file__).parents[2],
            capture_output=True,
            text=True,
            check=False,
        )
    assert found.returncode == 0, found.stderr[-2000:]
    return [json.loads(line) for line in found.stdout.splitlines()]


def allowed_to_spill(kernel: dict[str, Any]) -> int:
    """Four blocks of threads a multiprocessor are faster where they rotate few rows, measured on an H100:
    blocks of 64 in two factors, and those of unusual sizes, have too few registers then. What expands
    singular-value deltas counts its passes there, once in many panels; with NVRTC 13.0 it need not."""
    few_rotate = kernel["name"] == "boft._rotate" and "FEW=True" in kernel["constants"]
    return 256 if few_rotate else 8 if kernel["name"] == "tensor_cores.expand_many" else 0


QUICK = ("bias", "column_loop", "tensor_cores")
SLOW = ("boft", "full", "lora", "sparse_delta", "svd_delta")


@pytest.mark.parametrize(
    "operation", [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)]
)
def test_kernels_compile_for_an_h200(operation: str) -> None:
    together = QUICK if operation in QUICK else SLOW
    kernels = [each for each in compiled(together) if each["name"].startswith(f"{operation}.")]
    assert kernels
    assert len(kernels) <= MAX_SPECIALISATIONS.get(operation, 20)
    for kernel in kernels:
        assert kernel["seconds"] < MAX_SECONDS, kernel
        assert kernel["spilled_bytes"] <= allowed_to_spill(kernel), kernel


@pytest.mark.parametrize("dtype", tensor_cores.DTYPES)
@pytest.mark.parametrize("parts", tensor_cores.PARTS)
def test_products_go_on_while_the_next_are_prepared_and_keep_their_registers(
    tmp_path: Path, dtype: torch.dtype, parts: int
) -> None:
    pytest.importorskip("triton", reason="brings the disassembler")
    pytest.importorskip("cuda.bindings", reason="brings the compiler")
    from testkit.kernels import pending_products as pending

    config = tensor_cores.MANY_ROWS[parts]
    options = config.options(dtype)
    cubin = nvrtc.compiled(sparse_delta.__name__, "sbmm_many.cu", tensor_cores.ARCHITECTURE, options)
    found = list(pending.loops(pending.lines_of(cubin, tmp_path)))
    assert len(found) == 4  # of 4 and 2 bits, with one scale a row and with several
    assert [pending.under_way(body) for body, _ in found] == [3] * 4
    assert [pending.written_too_soon(*each) for each in found] == [[]] * 4


@pytest.mark.parametrize("dtype", tensor_cores.DTYPES)
def test_products_go_on_while_weights_are_merged_for_the_next(tmp_path: Path, dtype: torch.dtype) -> None:
    pytest.importorskip("triton", reason="brings the disassembler")
    pytest.importorskip("cuda.bindings", reason="brings the compiler")
    from testkit.kernels import pending_products as pending

    options = merged_rows.options(dtype)
    cubin = nvrtc.compiled(sparse_delta.__name__, "merged_rows.cu", tensor_cores.ARCHITECTURE, options)
    found = list(pending.loops(pending.lines_of(cubin, tmp_path)))
    own = [body for body, _ in found if pending.under_way(body) == 3]  # others wait for copies, and come back
    assert len(own) == 5 * 3  # heights of a product; 4, 2 and no bits
    assert all(sum(pending.PRODUCT.match(each) is not None for each in body) == 4 for body in own)
    assert [pending.written_too_soon(*each) for each in found] == [[]] * len(found)
