"""What a GPU can run, by its name. Estimates, plans, placements and simulations all use this table.

Names are those of data sheets ("A100-80GB") and of drivers ("NVIDIA A100-SXM4-80GB"). A GPU that is not in
the table is assumed to run everything: its engine reports what it cannot run when it is measured.
"""

from __future__ import annotations

import re

from profiler.quantization import QUANTIZATIONS

Capability = tuple[int, int]

# NVIDIA's compute capabilities. The first entry whose words are all in the GPU's name counts.
_CAPABILITIES: tuple[tuple[Capability, tuple[str, ...]], ...] = (
    ((12, 1), ("GB10",)),
    ((12, 0), ("Blackwell", "5060", "5070", "5080", "5090")),
    ((10, 3), ("B300", "GB300")),
    ((10, 0), ("B100", "B200", "GB200")),
    ((9, 0), ("H20", "H100", "H200", "H800", "GH200")),
    ((8, 9), ("Ada", "L2", "L4", "L20", "L40", "L40S", "4060", "4070", "4080", "4090")),
    ((8, 7), ("Orin",)),
    ((8, 6), ("A2", "A10", "A10G", "A16", "A40", "A2000", "A4000", "A4500", "A5000", "A5500", "A6000")),
    ((8, 6), ("3050", "3060", "3070", "3080", "3090")),
    ((8, 0), ("A30", "A100", "A800")),
    ((7, 5), ("T4", "T4G", "T400", "T600", "T1000", "TITAN RTX", "Quadro RTX")),
    ((7, 5), ("1650", "1660", "2060", "2070", "2080")),
    ((7, 0), ("V100", "TITAN V")),
    ((6, 1), ("P4", "P40", "1050", "1060", "1070", "1080")),
    ((6, 0), ("P100",)),
)
_OTHER_MAKERS = {"amd", "intel", "arm"}


def compute_capability(gpu: str) -> Capability | None:
    """The compute capability of the GPU with this name; None if the table does not have the GPU."""
    words = _words(gpu)
    if words & _OTHER_MAKERS:
        return None
    for capability, names in _CAPABILITIES:
        if any(_words(name) <= words for name in names):
            return capability
    return None


def _words(name: str) -> set[str]:
    return {word.removesuffix("ti") for word in re.findall(r"[a-z0-9]+", name.lower())}


def runs(quantization: str, gpu: str) -> bool:
    """Whether a GPU of this name supports the quantization's arithmetic; "": any GPU, or a CPU host."""
    return gpu_problem(quantization, gpu) is None


def gpu_problem(quantization: str, gpu: str) -> str | None:
    """Why a GPU of this name cannot run a quantization; None if it can."""
    known, found = QUANTIZATIONS.get(quantization), compute_capability(gpu)
    if known is None or found is None or found >= known.min_capability:
        return None
    needed, has = (".".join(map(str, capability)) for capability in (known.min_capability, found))
    return f"{quantization} needs GPUs of compute capability {needed} or higher, but {gpu} has {has}"
