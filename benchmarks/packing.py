"""How fast a variant gets into host memory: read, verified, packed and, with a GPU, page-locked.

    python -m benchmarks.packing --threads 1,2,4,8 --out RESULT.json

Deltas of random codes, and LoRA adapters of random weights on q, k, v and o, for layers of a Llama-2-7B;
their files come from the page cache. GB are of files.
`cpu_s_per_gb` counts all threads, and is what other work on the machine disturbs least.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks import gpu_engine, gpu_lora, rehearsing
from benchmarks.serving import deltas
from benchmarks.serving.settings import SHAPES
from profiler.checkpoint import read_model
from workers.variant_config import VariantConfig
from workers.variants.host import pack
from workers.variants.kinds import open_variant
from workers.variants.loader_threads import LoaderThreads
from workers.variants.shapes import LayerShape, LinearShape, NormShape, Slice, VocabularyShape

FUSED = (("q_proj", "k_proj", "v_proj"), ("o_proj",), ("gate_proj", "up_proj"), ("down_proj",))


def layers(shape: dict[str, int]) -> Iterator[LayerShape]:
    """As an engine of one rank has them."""
    hidden, vocabulary = shape["hidden_size"], shape["vocab_size"]
    linears = {name.split(".")[1]: (name, dims) for name, dims in gpu_engine.linear_shapes(shape).items()}
    for head, name in ((False, "model.embed_tokens"), (True, "lm_head")):
        yield VocabularyShape(name, 0, vocabulary, vocabulary, hidden, head, False)
    yield NormShape("model.norm", hidden)
    for layer in range(shape["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        for norm in ("input_layernorm", "post_attention_layernorm"):
            yield NormShape(f"{at}{norm}", hidden)
        for names in FUSED:
            parts = [(f"{at}{linears[name][0]}", *linears[name][1]) for name in names]
            slices = tuple(Slice(name, 0, out, out) for name, out, _ in parts)
            yield LinearShape(at + "+".join(names), slices, 0, parts[0][2], parts[0][2])


def measured(base: Path, variant: Path, shape: dict[str, int], threads: int, rounds: int) -> dict[str, Any]:
    """Medians over `rounds`, after one that is not counted."""
    config, loader = VariantConfig(1, 0, 0, 256), LoaderThreads(threads)
    gigabytes = sum(path.stat().st_size for path in variant.glob("*.safetensors")) / 1e9
    spec, walls, cpus = read_model(base), [], []
    for _ in range(rounds + 1):
        start, cpu = time.perf_counter(), time.process_time()
        opened, pinned = open_variant(variant, spec, config), torch.cuda.is_available()
        held = pack(opened, list(layers(shape)), torch.bfloat16, pinned, loader)
        walls.append(time.perf_counter() - start)
        cpus.append(time.process_time() - cpu)
        del held
        gc.collect()
    return {
        "threads": threads,
        "gb": round(gigabytes, 3),
        "gb_per_s": round(gigabytes / statistics.median(walls[1:]), 3),
        "cpu_s_per_gb": round(statistics.median(cpus[1:]) / gigabytes, 3),
    }


def main(argv: Sequence[str] | None = None) -> None:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--shape", choices=SHAPES, default="7b")
    options.add_argument("--layers", type=int, default=32)
    options.add_argument("--bits", default="4,2", help="of deltas")
    options.add_argument("--ranks", default="64", help="of LoRA adapters")
    options.add_argument("--threads", default="1,2,4,8")
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--out", type=Path, required=True, help="JSON")
    given = options.parse_args(argv)
    shape = {**SHAPES[given.shape], "num_hidden_layers": given.layers}
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        base = gpu_engine.write_dummy_base(Path(folder) / "base", shape)
        for what, variant in _variants(given, base, shape, Path(folder)):
            for threads in map(int, given.threads.split(",")):
                rows.append({**what, **measured(base, variant, shape, threads, given.rounds)})
                print(json.dumps(rows[-1]), flush=True)
    command = rehearsing.command("benchmarks.packing", argv)
    rehearsing.write_result(given.out, {"command": command, "rows": rows})


def _variants(
    given: argparse.Namespace, base: Path, shape: dict[str, int], folder: Path
) -> Iterator[tuple[dict[str, int], Path]]:
    for bits in map(int, filter(None, given.bits.split(","))):
        yield {"bits": bits}, deltas.write(base, shape, folder / f"delta-{bits}bit", bits, 0)
    for rank in map(int, filter(None, given.ranks.split(","))):
        yield {"rank": rank}, gpu_lora.write_adapter(folder / f"lora-{rank}", rank, 0, shape)


def rehearse(folder: Path) -> None:
    """Deltas of both widths, and an adapter, of a tiny model, by one thread and by two."""
    out = folder / "packing.json"
    sizes = ["--shape", "tiny", "--layers", "1", "--ranks", "8"]
    main([*sizes, "--threads", "1,2", "--rounds", "1", "--out", str(out)])
    assert len(rehearsing.check(out)["rows"]) == 6


if __name__ == "__main__":
    rehearsing.run(main, rehearse)
