"""Refuses a broken torch family with a clear message, before vLLM fails with an obscure one.

The registry's torch, torchvision and torchaudio are CUDA builds. Without CUDA's libraries that torch does not
import. With a CPU torch its CUDA companions do not import, and `transformers` imports them if they are
installed. `python -m workers.engine.torch_check` reports this and ends with 1.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys

TORCH = "torch"
COMPANIONS = ("torchvision", "torchaudio")


class BrokenTorchStack(RuntimeError):
    """torch, or an installed companion of it, cannot be imported."""


def check() -> None:
    """Raises BrokenTorchStack with torch, or each installed but broken companion, and the remedy."""
    if (reason := _failure(TORCH)) is not None:
        raise BrokenTorchStack(
            f"the installed torch cannot be imported ({reason}); a CPU machine needs a CPU build of torch: "
            "set PIP_EXTRA_INDEX_URL to an index with CPU builds (torch's installation page names an index), "
            "then run `make install TORCH=torch==2.13.0+cpu` (requirements/README.md)"
        )
    broken = {name: reason for name in COMPANIONS if (reason := _failure(name)) is not None}
    if broken:
        names = " ".join(broken)
        raise BrokenTorchStack(
            f"{names} does not match the installed torch ({', '.join(broken.values())}), so engines fail to "
            f"start; engines do not need it: run `pip uninstall -y {names}`, "
            "or install from requirements/cpu.txt, which leaves it out"
        )


def has_companions() -> bool:
    """Whether companions of torch are installed and need a check. Imports nothing."""
    return any(importlib.util.find_spec(name) is not None for name in COMPANIONS)


def main() -> None:
    try:
        check()
    except BrokenTorchStack as error:
        print(error)
        sys.exit(1)


def _failure(name: str) -> str | None:
    if importlib.util.find_spec(name) is None:
        return None
    try:
        importlib.import_module(name)
    except Exception as e:
        return f"{name}: {type(e).__name__}: {str(e).splitlines()[0] if str(e) else ''}"
    return None


if __name__ == "__main__":
    main()
