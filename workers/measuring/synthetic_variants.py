"""Made-up variants for measurements, for a fingerprint: their first layers, random but valid.

Files are in the formats of PEFT and `workers.deltas`, so that the engine reads and checks them like any
other.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import assert_never

import numpy as np
import numpy.typing as npt
import torch
from safetensors.numpy import save_file

from profiler.checkpoint import block_of, expected_tensors, read_model
from profiler.measurements import SyntheticVariant
from profiler.types import ModelSpec, adaptable_linears
from profiler.variants.delta import DELTA, FORMAT, VERSION, layer_file
from profiler.variants.types import VariantKind
from workers.deltas.parts import sparse_parts
from workers.deltas.sparse import encode
from workers.deltas.writing import NAMES, SafetensorsWriter

Arrays = dict[str, npt.NDArray[np.float16]]
SMALL = 1e-3  # as in the made-up weights of the base
STORED = {"float32": ("F32", 4), "bfloat16": ("BF16", 2), "float16": ("F16", 2)}


def write_weightless(folder: Path, dtype: str) -> ModelSpec:
    """Give the config in `folder` weights that are a hole in their file.

    Variants are checked against names and shapes. Raises CheckpointError for a config that cannot be served.
    """
    name, size = STORED[dtype]
    header, at = {}, 0
    for tensor, shape in expected_tensors(folder).items():
        end = at + size * int(np.prod(shape))
        header[tensor] = {"dtype": name, "shape": shape, "data_offsets": [at, end]}
        at = end
    raw = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(raw)) + raw)
        file.truncate(8 + len(raw) + at)
    return read_model(folder)


def write(variant: SyntheticVariant, base: ModelSpec, layers: int, folder: Path) -> Path:
    """Write the first `layers` layers of a variant as the new folder `folder`."""
    folder.mkdir(parents=True)
    rng = np.random.default_rng(variant.seed)
    match VariantKind(variant.kind):
        case VariantKind.LORA:
            _write_lora(variant, list(_modules(base, layers)), folder, rng)
        case VariantKind.BOFT:
            _write_boft(variant, list(_modules(base, layers)), folder, rng)
        case VariantKind.SPARSE_DELTA:
            _write_sparse(variant, base, layers, folder, rng)
        case VariantKind.SVD_DELTA:
            raise ValueError("expected another kind than a low-rank delta: LoRA represents low-rank deltas")
        case unknown:
            assert_never(unknown)
    return folder


def _modules(base: ModelSpec, layers: int, first: int = 0) -> Iterator[tuple[str, int, int]]:
    """Name, out and in of every module that variants change."""
    for layer in range(first, layers):
        for name, linear in adaptable_linears(base).items():
            yield f"{base.layer_prefix}{layer}.{block_of(name)}.{name}", linear.out, linear.into


def _small(rng: np.random.Generator, *shape: int) -> npt.NDArray[np.float16]:
    return (SMALL * rng.standard_normal(shape)).astype(np.float16)


def _write_lora(
    variant: SyntheticVariant, modules: list[tuple[str, int, int]], folder: Path, rng: np.random.Generator
) -> None:
    tensors: Arrays = {}
    for name, out, into in modules:
        tensors[f"base_model.model.{name}.lora_A.weight"] = _small(rng, variant.rank, into)
        tensors[f"base_model.model.{name}.lora_B.weight"] = _small(rng, out, variant.rank)
    _save(folder, tensors, modules, {"peft_type": "LORA", "r": variant.rank, "lora_alpha": variant.rank})


def _write_boft(
    variant: SyntheticVariant, modules: list[tuple[str, int, int]], folder: Path, rng: np.random.Generator
) -> None:
    tensors: Arrays = {}
    for name, out, into in modules:
        size = variant.block_size
        tensors[f"base_model.model.{name}.boft_R"] = _small(rng, variant.factors, into // size, size, size)
        tensors[f"base_model.model.{name}.boft_s"] = np.ones((out, 1), np.float16)
    config = {
        "peft_type": "BOFT",
        "boft_block_size": variant.block_size,
        "boft_block_num": 0,
        "boft_n_butterfly_factor": variant.factors,
    }
    _save(folder, tensors, modules, config)


def _save(
    folder: Path, tensors: Arrays, modules: list[tuple[str, int, int]], config: dict[str, object]
) -> None:
    save_file(tensors, folder / "adapter_model.safetensors")
    targets = sorted({name.rpartition(".")[2] for name, *_ in modules})
    common = {"task_type": "CAUSAL_LM", "bias": "none", "target_modules": targets}
    (folder / "adapter_config.json").write_text(json.dumps({**common, **config}))


def _write_sparse(
    variant: SyntheticVariant, base: ModelSpec, layers: int, folder: Path, rng: np.random.Generator
) -> None:
    """Write a sparse delta. Coding is slow, so modules of one shape share a code."""
    described: dict[str, dict[str, object]] = {"files": {}, "modules": {}, "full": {}}
    codes: dict[tuple[int, int], Mapping[str, torch.Tensor]] = {}
    for layer in range(layers):
        file, parts = layer_file(layer), dict[str, torch.Tensor]()
        for name, out, into in _modules(base, layer + 1, layer):
            if (out, into) not in codes:
                matrix = torch.from_numpy(_small(rng, out, into)).float()
                codes[out, into] = sparse_parts(encode(matrix, variant.bits))[0]
            parts |= {f"{name}.{part}": tensor for part, tensor in codes[out, into].items()}
            described["modules"][name] = {"file": file}
        with SafetensorsWriter(
            folder / file, {name: (NAMES[t.dtype], tuple(t.shape)) for name, t in parts.items()}
        ) as writer:
            for name in writer.order:
                writer.write(name, parts[name])
        described["files"][file] = {"size_bytes": writer.size_bytes, "sha256": writer.sha256}
    facts = {
        "format": FORMAT,
        "version": VERSION,
        "kind": variant.kind,
        "bits": variant.bits,
        "group_size": None,
    }
    origin = {"method": "random", "tool": "a profile", "base": {"fingerprint": base.fingerprint}}
    (folder / DELTA).write_text(json.dumps({**facts, **origin, **described}))
