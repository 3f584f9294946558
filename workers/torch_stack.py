"""Refuses a broken torch family with a clear message, before vLLM fails with an obscure one.

The registry's torchvision and torchaudio are CUDA builds; beside a CPU torch they do not import, and
`transformers` imports them when they are installed.
"""

from __future__ import annotations

import importlib
import importlib.util

COMPANIONS = ("torchvision", "torchaudio")


class BrokenTorchStack(RuntimeError):
    """A companion of torch is installed but cannot be imported."""


def check() -> None:
    """Raises BrokenTorchStack naming each companion that is installed but broken, and the remedy."""
    broken = {name: reason for name in COMPANIONS if (reason := _failure(name)) is not None}
    if broken:
        names = " ".join(broken)
        raise BrokenTorchStack(
            f"{names} does not match the installed torch ({'; '.join(broken.values())}). "
            f"The engine needs none of them: run `pip uninstall -y {names}`, "
            "or install from requirements/cpu.txt, which leaves them out."
        )


def _failure(name: str) -> str | None:
    if importlib.util.find_spec(name) is None:
        return None
    try:
        importlib.import_module(name)
    except Exception as e:
        return f"{name}: {type(e).__name__}: {str(e).splitlines()[0] if str(e) else ''}"
    return None
