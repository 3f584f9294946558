"""Deltas of random codes, written straight in our format: packing real weights of a 7B takes far too long.

A loader cannot tell them from real ones: headers, checksums, valid indices and finite values are all there.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks import gpu_engine
from profiler.checkpoint import read_model
from profiler.files import DTYPE_BYTES
from profiler.variants.delta import (
    CODES,
    DELTA,
    DIFFERENCE_BITS,
    DIFFERENCE_VERSION,
    DIFFERENCES,
    FORMAT,
    FULL_FILE,
    SCALES,
    layer_file,
)
from profiler.variants.modules import EMBEDDING, HEAD
from workers.deltas.writing import SafetensorsWriter

POOL_BYTES = 16 << 20  # random bytes of which tensors are cut; making them again costs more than hashing them
KEPT_PAIRS = np.array([i | j << 2 for i in range(4) for j in range(i + 1, 4)], np.uint8)
LARGEST_STEP = 2e-4  # of a code: dummy weights are within 1e-3, so variants differ and stay finite
WIDEST = 4  # bytes of a number
SMALL_STEP = 1e-5  # of a code of 8 bits

Entry = tuple[str, tuple[int, ...]]  # safetensors' type and shape
Pools = dict[str, npt.NDArray[np.uint8]]


def write(
    base: Path, shape: dict[str, int], folder: Path, bits: int, seed: int, whole_tables: bool = False
) -> Path:
    """A 2:4 delta of every linear layer, whole norms, and embedding and head as differences or as wholes."""
    if (folder / DELTA).exists():
        return folder
    folder.mkdir(parents=True)
    pools = _pools(np.random.default_rng(seed))
    described: dict[str, dict[str, Any]] = {"files": {}, "modules": {}, "full": {}, DIFFERENCES: {}}
    with ThreadPoolExecutor() as pool:  # hashing and writing let go of the interpreter
        written = {}
        for number, (file, modules, full) in enumerate(_contents(shape)):
            differing = {} if whole_tables else {n: d for n, d in full.items() if n in (EMBEDDING, HEAD)}
            entries = {name: entry for m, dims in modules.items() for name, entry in _parts(m, dims, bits)}
            entries |= {name: ("BF16", dims) for name, dims in full.items() if name not in differing}
            entries |= {name: entry for n, dims in differing.items() for name, entry in _difference(n, dims)}
            rng = np.random.default_rng([seed, number])
            written[file] = pool.submit(_write_file, folder / file, entries, pools, rng)
            described["modules"] |= {module: {"file": file} for module in modules}
            described["full"] |= {name: {"file": file} for name in full.keys() - differing.keys()}
            described[DIFFERENCES] |= {n: {"file": file, "bits": DIFFERENCE_BITS} for n in differing}
        described["files"] = {file: facts.result() for file, facts in written.items()}
    facts = {"format": FORMAT, "version": DIFFERENCE_VERSION, "kind": "sparse_delta"}
    facts |= {"bits": bits, "group_size": None}
    origin = {"method": "random codes", "tool": "benchmarks.serving"}
    mark = {"base": {"fingerprint": read_model(base).fingerprint}}
    (folder / DELTA).write_text(json.dumps({**facts, **origin, **mark, **described}))
    return folder


def _contents(
    shape: dict[str, int],
) -> Iterator[tuple[str, dict[str, tuple[int, int]], dict[str, tuple[int, ...]]]]:
    """File by file: its modules and its whole tensors."""
    tensors = {name: tuple(dims) for name, dims in gpu_engine.tensor_shapes(shape).items()}
    for layer in range(shape["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        modules = {f"{at}{name}": dims for name, dims in gpu_engine.linear_shapes(shape).items()}
        norms = {n: d for n, d in tensors.items() if n.startswith(at) and n.endswith("norm.weight")}
        yield layer_file(layer), modules, norms
    yield FULL_FILE, {}, {n: d for n, d in tensors.items() if not n.startswith("model.layers.")}


def _parts(module: str, dims: tuple[int, int], bits: int) -> Iterator[tuple[str, Entry]]:
    out, into = dims
    yield f"{module}.values", ("U8", (out, into // (4 if bits == 4 else 8)))
    yield f"{module}.indices", ("U8", (out, into // 8))
    yield f"{module}.scales", ("F16", (out, 1))


def _difference(table: str, dims: tuple[int, ...]) -> Iterator[tuple[str, Entry]]:
    yield f"{table}{CODES}", ("I8", dims)
    yield f"{table}{SCALES}", ("F32", dims[:1])


def _pools(rng: np.random.Generator) -> Pools:
    """By the end of a tensor's name: bytes that any such tensor may hold."""
    pairs = rng.choice(KEPT_PAIRS, (2, POOL_BYTES))
    small = rng.standard_normal(POOL_BYTES // 2, np.float32)
    return {
        "values": rng.integers(256, size=POOL_BYTES, dtype=np.uint8),
        "codes": rng.integers(256, size=POOL_BYTES, dtype=np.uint8),
        "steps": (SMALL_STEP * rng.uniform(0.5, 1, POOL_BYTES // 64)).astype(np.float32).view(np.uint8),
        "indices": pairs[0] | pairs[1] << 4,
        "scales": (LARGEST_STEP * rng.uniform(0.5, 1, POOL_BYTES // 16)).astype(np.float16).view(np.uint8),
        "norm": _bfloat16(1 + 0.05 * small[: POOL_BYTES // 16]),
        "weight": _bfloat16(1e-3 * small),
    }


def _bfloat16(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint8]:
    """Their upper halves."""
    return (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)


def _write_file(
    path: Path, entries: dict[str, Entry], pools: Pools, rng: np.random.Generator
) -> dict[str, Any]:
    with SafetensorsWriter(path, entries) as writer:
        for name in writer.order:
            kind, dims = entries[name]
            size = math.prod(dims) * DTYPE_BYTES[kind]
            writer.write_bytes(name, _cut(_pool(pools, name), size, rng).data)
    return {"size_bytes": writer.size_bytes, "sha256": writer.sha256}


def _pool(pools: Pools, name: str) -> npt.NDArray[np.uint8]:
    if name.endswith("norm.weight"):
        return pools["norm"]
    if name.endswith(f"weight{SCALES}"):
        return pools["steps"]
    return pools[name.rpartition(".")[2]]


def _cut(pool: npt.NDArray[np.uint8], size: int, rng: np.random.Generator) -> npt.NDArray[np.uint8]:
    """This number of bytes of the pool, from somewhere in it, around its end if need be."""
    start = WIDEST * int(rng.integers(len(pool) // WIDEST))
    return np.resize(np.roll(pool, -start) if size > len(pool) - start else pool[start:], size)
