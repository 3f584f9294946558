"""Rates of common GPUs from data sheets: peaks at bf16 without sparsity, used for what-if only.

Rates measured on the devices themselves (`types` in the file) are better.
"""

from __future__ import annotations

from placement.solver.cluster import GpuType

_DATA_SHEETS = {  # name: (GB/s of memory, dense bf16 TFLOP/s)
    "L4": (300, 121),
    "L40S": (864, 362),
    "A10": (600, 125),
    "A6000": (768, 155),
    "A100-40GB": (1555, 312),
    "A100-80GB": (2039, 312),
    "H100": (3350, 989),
    "H200": (4800, 989),
}

KNOWN = {
    name: GpuType(name, bandwidth * 1e9, tflops * 1e12) for name, (bandwidth, tflops) in _DATA_SHEETS.items()
}

# Memory of each, in GiB, as drivers report it.
MEMORY_GIB = {
    "L4": 22.5,
    "L40S": 45.0,
    "A10": 22.5,
    "A6000": 48.0,
    "A100-40GB": 40.0,
    "A100-80GB": 80.0,
    "H100": 79.6,
    "H200": 140.4,
}
