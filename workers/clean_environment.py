"""Environments of processes that work with what strangers wrote: what our code and its libraries need, and no
secrets."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

KEPT = (
    "PATH",
    "HOME",
    "USER",
    "LOGNAME",
    "LANG",
    "LC_ALL",
    "LD_LIBRARY_PATH",
    "TMPDIR",
    "PYTHONDONTWRITEBYTECODE",
)
# Of libraries: which devices there are, where compiled code is kept, how many threads there are.
KEPT_PREFIXES = (
    "CUDA_",
    "CUBLAS_",
    "CUDNN_",
    "NVIDIA_",
    "NCCL_",
    "TORCH",
    "PYTORCH_",
    "TRITON_",
    "NUMBA_",
    "OMP_",
    "MKL_",
    "OPENBLAS_",
    "XDG_CACHE_",
)
# `down` ends what bears the mark; where compiled code is kept; what kernels are used.
OURS = (
    "OSTINATO_CLUSTER",
    "OSTINATO_COMPILED_DIR",
    "OSTINATO_SVD_TENSOR_CORES",
    "OSTINATO_SPARSE_TENSOR_CORES",
)


# What opens the installation, which no engine needs.
SECRETS = ("OSTINATO_API_KEY", "OSTINATO_STORE_URL")


def without_secrets(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """For a process of vLLM's, whose settings are many."""
    return {name: value for name, value in environment.items() if name not in SECRETS}


def forget_secrets() -> None:
    """In this process, and in those that it starts from now on."""
    for name in SECRETS:
        os.environ.pop(name, None)


def clean_environment(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """With our code on its path, and nothing fetched from a hub."""
    kept = {
        name: value
        for name, value in environment.items()
        if name in KEPT or name in OURS or name.startswith(KEPT_PREFIXES)
    }
    ours = str(Path(__file__).parents[1])
    return kept | {"PYTHONPATH": ours, "HF_HUB_OFFLINE": "1"}
