"""What zstd finds in codes of deltas, and the storage below whose rate decompressing them pays.

    python -m benchmarks.compression.lossless [DELTA ...] [--out benchmarks/results/compression_lossless.json]

DELTA: folders of deltas in version 1, which are copied. Without any: a layer of a 7B model's shapes (hidden
4096, 11008 between) whose delta is drawn from a normal distribution, in each format; the low-rank one at a
quarter of each side. Seconds are a processor's.
"""

from __future__ import annotations

import argparse
import json
import platform
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks import rehearsing
from profiler.variants.delta import DELTA, layer_file
from workers.compression.lossless import MB, compress_files
from workers.deltas import sparse, svd
from workers.deltas.parts import sparse_parts, svd_parts
from workers.deltas.writing import NAMES, SafetensorsWriter

LEVELS = (1, 3)
HIDDEN, BETWEEN = 4096, 11008
NO_STORAGE_MB_PER_S = 1e-6  # so slow that every file is packed that gets smaller
RANKS = 64  # of the low-rank delta that is coded: its width, not its values, is what matters here


def shapes(scale: int) -> dict[str, tuple[int, int]]:
    """(out, in) of a layer's matrices, each side divided by `scale`."""
    hidden, between = HIDDEN // scale, BETWEEN // scale
    square = dict.fromkeys(("q", "k", "v", "o"), (hidden, hidden))
    return {**square, "gate": (between, hidden), "up": (between, hidden), "down": (hidden, between)}


def deltas(scratch: Path, scale: int) -> Iterator[tuple[str, Path]]:
    """One layer in each format."""
    drawn = torch.Generator().manual_seed(0)
    for bits in (4, 2):
        parts: dict[str, torch.Tensor] = {}
        for name, shape in shapes(scale).items():
            code = sparse_parts(sparse.encode(torch.randn(shape, generator=drawn), bits, None))[0]
            parts |= {f"{name}.{part}": tensor for part, tensor in code.items()}
        yield f"sparse_delta, {bits} bits", _folder(scratch / f"sparse-{bits}", parts)
    parts = {}
    for name, (out, into) in shapes(4 * scale).items():
        low = torch.randn(out, RANKS, generator=drawn) @ torch.randn(RANKS, into, generator=drawn)
        groups = svd.default_groups((out, into), 1 / 64)
        parts |= {f"{name}.{part}": tensor for part, tensor in svd_parts(svd.encode(low, groups))[0].items()}
    yield "svd_delta, 8, 3 and 2 bits", _folder(scratch / "svd", parts)


def figures(folder: Path, level: int) -> dict[str, Any]:
    """A copy of the delta compressed at a level."""
    with tempfile.TemporaryDirectory() as scratch:
        copy = shutil.copytree(folder, Path(scratch) / "delta")
        started = time.process_time()
        made = compress_files(copy, NO_STORAGE_MB_PER_S, level)
        seconds = time.process_time() - started
    saved = made.size_before_bytes - made.size_after_bytes
    decompress_s = sum(file.decompress_s for file in made.files)
    return {
        "level": level,
        "size_before_bytes": made.size_before_bytes,
        "size_after_bytes": made.size_after_bytes,
        "compress_s": round(seconds, 2),
        "decompressed_mb_per_s": round(made.decompressed_bytes_per_s / MB),
        "pays_below_storage_mb_per_s": round(saved / decompress_s / MB),
    }


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("deltas", nargs="*", type=Path)
    parser.add_argument(
        "--scale", type=int, default=1, help="both sides of the drawn matrices are so much shorter"
    )
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args(argv)
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        named = [(path.name, path) for path in asked.deltas] or deltas(Path(scratch), asked.scale)
        for label, folder in named:
            for level in LEVELS:
                rows.append({"delta": label, **figures(folder, level)})
                print(json.dumps(rows[-1]), flush=True)
    if asked.out is not None:
        command = rehearsing.command("benchmarks.compression.lossless", argv)
        rehearsing.write_result(asked.out, {"command": command, "processor": _processor(), "rows": rows})


def _folder(folder: Path, tensors: Mapping[str, torch.Tensor]) -> Path:
    """A delta of one file, with what packing needs of its delta.json."""
    folder.mkdir(parents=True)
    name = layer_file(0)
    entries = {tensor: (NAMES[value.dtype], tuple(value.shape)) for tensor, value in tensors.items()}
    with SafetensorsWriter(folder / name, entries) as writer:
        for tensor in writer.order:
            writer.write(tensor, tensors[tensor])
    entry = {"size_bytes": writer.size_bytes, "sha256": writer.sha256}
    (folder / DELTA).write_text(json.dumps({"version": 1, "files": {name: entry}}))
    return folder


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    found = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(found, platform.processor())


def rehearse(folder: Path) -> None:
    """A tiny layer. Codes of each format get smaller: a normal distribution uses some more than others."""
    out = folder / "lossless.json"
    main(["--scale", "32", "--out", str(out)])
    rows = rehearsing.check(out, "rows")["rows"]
    assert {row["delta"].split(",")[0] for row in rows} == {"sparse_delta", "svd_delta"}
    assert all(row["size_after_bytes"] <= row["size_before_bytes"] for row in rows)


if __name__ == "__main__":
    rehearsing.run(main, rehearse)
