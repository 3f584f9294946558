"""Environments for processes that handle untrusted files: the variables of our code and its libraries,
without secrets.
"""

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
# Variables of libraries: the visible devices, the caches of compiled code, the numbers of threads.
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
# The mark by which `down` finds processes; the cache of compiled code; the choice of kernels.
OURS = (
    "OSTINATO_CLUSTER",
    "OSTINATO_COMPILED_DIR",
    "OSTINATO_SVD_TENSOR_CORES",
    "OSTINATO_SPARSE_TENSOR_CORES",
)


# Secrets that open the installation or the sources of models; no engine needs them.
SECRETS = (
    "OSTINATO_API_KEY",
    "OSTINATO_STORE_URL",
    "HF_TOKEN",
    "HUGGING_FACE_HUB_TOKEN",
    "AWS_ACCESS_KEY_ID",
    "AWS_SECRET_ACCESS_KEY",
    "AWS_SESSION_TOKEN",
    "GOOGLE_APPLICATION_CREDENTIALS",
)


def without_secrets(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The environment for a process of vLLM's, which has many settings."""
    return {name: value for name, value in environment.items() if name not in SECRETS}


def forget_secrets() -> None:
    """Remove the secrets from this process, and from its later children."""
    for name in SECRETS:
        os.environ.pop(name, None)


def clean_environment(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The environment with our code on its path, and without downloads from a hub."""
    kept = {
        name: value
        for name, value in environment.items()
        if name in KEPT or name in OURS or name.startswith(KEPT_PREFIXES)
    }
    ours = str(Path(__file__).parents[1])
    return kept | {"PYTHONPATH": ours, "HF_HUB_OFFLINE": "1"}
