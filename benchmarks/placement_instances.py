"""Models and clusters for `benchmarks.placement`: published shapes, random fragments, the paper's testbed."""

from __future__ import annotations

import random
from dataclasses import replace

from placement.solver.cluster import Cluster, Gpu, Node, Resident
from placement.solver.gpu_types import KNOWN
from placement.solver.request import Compression, ModelFigures, Request
from placement.types import Intent, Slos

GIB = 2**30
LINKS = (56e9, 25e9, 12.5e9)  # NVLink pairs of A6000s, PCIe 4, 100 Gbit/s
# Accuracy as a share of fp16's MMLU, of Llama-2-7B (published); taken for all. Layer bytes over fp16's.
FORMS = {"fp16": (1.0, 1.0), "int8": (0.998, 0.5), "int4": (0.871, 0.27)}
# layers, hidden, heads, KV heads, head width, parameters of a layer, vocabulary
SHAPES = {
    "gpt-j-6b": (28, 4096, 16, 16, 256, 12 * 4096**2, 50400),
    "llama-2-7b": (32, 4096, 32, 32, 128, 4 * 4096**2 + 3 * 4096 * 11008, 32000),
    "falcon-7b": (32, 4544, 71, 1, 64, 10 * 4544**2 + 2 * 4544 * 64, 65024),
    "llama-2-13b": (40, 5120, 40, 40, 128, 4 * 5120**2 + 3 * 5120 * 13824, 32000),
    "falcon-40b": (60, 8192, 128, 8, 64, 10 * 8192**2 + 2 * 8192 * 8 * 64, 65024),
    "llama-2-70b": (80, 8192, 64, 8, 128, 2 * 8192**2 + 2 * 8192 * 1024 + 3 * 8192 * 28672, 32000),
}


def model(name: str, *forms: str) -> ModelFigures:
    """In the compressions named, or all."""
    layers, hidden, heads, kv_heads, width, parameters, vocabulary = SHAPES[name]
    kv_bytes = 2 * kv_heads * width * 2
    return ModelFigures(
        name=name,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        embedding_bytes=2 * vocabulary * hidden,
        head_bytes=2 * vocabulary * hidden,
        hidden_bytes=2 * hidden,
        layer_flops=2.0 * parameters,
        overhead_bytes=GIB,
        tables_everywhere=name.startswith(("gpt-j", "falcon")),
        compressions=tuple(
            Compression(form, FORMS[form][0], round(2 * parameters * FORMS[form][1]), kv_bytes)
            for form in forms or tuple(FORMS)
        ),
    )


def small_cluster(rng: random.Random) -> Cluster:
    """2 to 6 GPUs on one or more nodes, mostly in part used and busy, of one or two types."""
    nodes: list[Node] = []
    left = rng.randint(2, 6)
    while left:
        size, kind = rng.randint(1, min(4, left)), rng.choice(("A6000", "L40S"))
        gpus = tuple(
            Gpu(
                i,
                kind,
                48 * GIB,
                rng.choice((48, rng.randint(4, 47))) * GIB,
                rng.choice((0, rng.random() * 0.8)),
                i // 2,
            )
            for i in range(size)
        )
        nodes.append(Node(f"n{len(nodes)}", gpus))
        left -= size
    return Cluster(tuple(nodes), (KNOWN["A6000"], KNOWN["L40S"]), LINKS)


def small_request(rng: random.Random) -> Request:
    return Request(
        name="new",
        model=model(rng.choice(tuple(SHAPES))),
        intent=rng.choice(tuple(Intent)),
        slos=Slos(accuracy=rng.choice((None, 0.99, 1.0))),
        rate_per_s=rng.choice((0.0, 0.2, 1.0)),
        input_tokens=256,
        output_tokens=128,
        concurrency=rng.choice((1, 8)),
        max_tp=4,
        max_pp=4,
    )


def large_cluster(
    rng: random.Random, gpus: int, models: int, free_gib: tuple[float, float] | None
) -> Cluster:
    """Nodes of 8 (or fewer) GPUs of 80 GB, two types, with `models` models on random GPUs.

    With `free_gib` every GPU has only this much left (from, to), as if many other models were there.
    """
    nodes = []
    for start in range(0, gpus, 8):
        kind = rng.choice(("A100-80GB", "H100"))
        row = []
        for index in range(min(8, gpus - start)):
            free = 80 * GIB if free_gib is None else round(rng.uniform(*free_gib) * GIB)
            row.append(Gpu(index, kind, 80 * GIB, free, 0.0 if free_gib is None else rng.random() * 0.9))
        nodes.append(Node(f"n{start // 8}", tuple(row)))
    for number in range(models):
        at = rng.randrange(len(nodes))
        node = nodes[at]
        width = min(rng.choice((1, 2, 4, 8)), len(node.gpus))
        chosen = set(rng.sample(range(len(node.gpus)), width))
        gpus_of = tuple(_filled(gpu, f"m{number}", rng) if gpu.index in chosen else gpu for gpu in node.gpus)
        nodes[at] = replace(node, gpus=gpus_of)
    return Cluster(tuple(nodes), (KNOWN["A100-80GB"], KNOWN["H100"]), (450e9, 64e9, 50e9))


def _filled(gpu: Gpu, name: str, rng: random.Random) -> Gpu:
    used = int(gpu.free_bytes * rng.uniform(0.05, 0.5))
    held = (*gpu.residents, Resident(name, 0, 32, used))
    return replace(gpu, free_bytes=gpu.free_bytes - used, load=min(1.0, gpu.load + 0.1), residents=held)


def paper_cluster() -> Cluster:
    """Section 8: one server, 8 A6000s of 48 GB, pairs joined by NVLink."""
    gpus = tuple(Gpu(index, "A6000", 48 * GIB, 48 * GIB, 0.0, index // 2) for index in range(8))
    return Cluster((Node("server", gpus),), (KNOWN["A6000"],), LINKS)


def paper_models(goal: Intent, *forms: str) -> list[Request]:
    """21 of the paper's six LLMs in turn, small ones four times, large ones three; it lists none."""
    names = [name for turn in range(4) for name in SHAPES if turn < 3 or SHAPES[name][0] <= 32]
    return [
        Request(
            name=f"{name}-{number}",
            model=model(name, *forms),
            intent=goal,
            rate_per_s=0.05,
            input_tokens=512,
            output_tokens=128,
            concurrency=8,
        )
        for number, name in enumerate(names, 1)
    ]
