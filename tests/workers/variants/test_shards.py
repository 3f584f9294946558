"""Each rank's part of a variant, put together over all ranks, is the variant: for every kind, for every way
to cut a layer. The reference are merged (dequantised) weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn.functional import linear

from profiler.checkpoint import read_model
from testkit import random_variants
from testkit.random_variants import EVERY_KIND, RandomDelta, RandomVariant
from workers.deltas.merge import merge
from workers.kernels.types import aligned
from workers.variant_config import VariantConfig
from workers.variants import layer_context, operators
from workers.variants.batch import Batch
from workers.variants.device import DeviceMemory
from workers.variants.host import pack
from workers.variants.kinds import open_variant
from workers.variants.shapes import LayerShape, LinearShape, NormShape, Slice, VocabularyShape

CPU = torch.device("cpu")
HEADS, KV_HEADS, HEAD, HIDDEN, INNER, VOCABULARY = 4, 2, 32, 128, 256, 64
SIZES: dict[str, Any] = {
    "hidden_size": HIDDEN,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD,
    "intermediate_size": INNER,
    "vocab_size": VOCABULARY,
}
BASES = {
    "llama": SIZES,
    "qwen2": {**SIZES, "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"},
}
CONFIG = VariantConfig(slots=3, arena_bytes=4 << 20, host_bytes=1 << 30, max_rank=16)
SLOT, ROWS = 1, 5
ALL = operators.operations_for(CONFIG.kinds)


@dataclass(frozen=True)
class LayerContext:
    """The operators' inputs about a layer."""

    batch: Batch
    arena: torch.Tensor
    tables: dict[str, torch.Tensor]
    workspace: layer_context.Workspace
    layout: AbstractContextManager[None] = field(default_factory=nullcontext)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Any:
    @cache
    def made(architecture: str, variant: RandomVariant) -> tuple[Path, Path, Path]:
        """Base, variant, and both merged."""
        root = tmp_path_factory.mktemp("variant")
        base = random_variants.write_tiny_base(root / "base", **BASES[architecture])
        folder = random_variants.write(base, root / variant.name, variant)
        merge(base, folder, root / "merged")
        return base, folder, root / "merged"

    return made


def column_parallel(at: str, parts: dict[str, tuple[int, int]], ranks: int) -> Iterator[LinearShape]:
    """Each rank's share of fused projections: by name their rows, and how many ranks share each row."""
    for rank in range(ranks):
        slices = []
        for name, (rows, copies) in parts.items():
            size = rows * copies // ranks
            slices.append(Slice(f"{at}.{name}", rank // copies * size, size, rows))
        yield LinearShape(f"{at}.fused", tuple(slices), 0, HIDDEN, HIDDEN)


def row_parallel(name: str, columns: int, ranks: int) -> Iterator[LinearShape]:
    size = columns // ranks
    for rank in range(ranks):
        yield LinearShape(name, (Slice(name, 0, HIDDEN, HIDDEN),), rank * size, size, columns)


def layers(ranks: int) -> dict[str, list[LinearShape]]:
    """Every rank's shape, by layer."""
    kv = (KV_HEADS * HEAD, max(1, ranks // KV_HEADS))
    attention, mlp = "model.layers.1.self_attn", "model.layers.0.mlp"
    qkv = {"q_proj": (HEADS * HEAD, 1), "k_proj": kv, "v_proj": kv}
    up = {"gate_proj": (INNER, 1), "up_proj": (INNER, 1)}
    return {
        "qkv": list(column_parallel(attention, qkv, ranks)),
        "o": list(row_parallel(f"{attention}.o_proj", HEADS * HEAD, ranks)),
        "gate_up": list(column_parallel(mlp, up, ranks)),
        "down": list(row_parallel(f"{mlp}.down_proj", INNER, ranks)),
    }


def context_of(folder: Path, base: Path, shape: LayerShape) -> LayerContext:
    """A rank that holds nothing but the variant's share of one layer."""
    ops = operators.LINEAR if isinstance(shape, LinearShape) else ("norm", "embedding", "head")
    widths = {(shape.name, op): operators.table_width(op, shape) for op in ops if op in ALL}
    memory = DeviceMemory(widths, CONFIG.slots, CONFIG.arena_bytes, CPU)
    memory.arena.fill_(0xA5)
    held = pack(open_variant(folder, read_model(base), CONFIG), [shape], torch.float32, pinned=False)
    memory.place(SLOT, held)
    batch = Batch(2 * ROWS, ROWS, CONFIG.slots, CPU)
    uids = [0, 7] * ROWS  # rows of the base and of the variant
    batch.describe(uids, uids[:ROWS], {7: SLOT}, held.operations)
    tables = {op: memory.table((shape.name, op)) for op in held.operations}
    return LayerContext(batch, memory.arena, tables, layer_context.Workspace(CONFIG, 2 * ROWS, 3, CPU))


def on_rank(
    context: LayerContext, shape: LinearShape, x: torch.Tensor, weights: dict[str, torch.Tensor]
) -> torch.Tensor:
    """This rank's result for the whole input, as the hook of a linear layer computes it."""
    own = [weights[f"{p.name}.weight"][p.rows, shape.columns] for p in shape.slices]
    biases = [weights[f"{p.name}.bias"][p.rows] for p in shape.slices if f"{p.name}.bias" in weights]
    bias = torch.cat(biases) if biases and shape.in_start == 0 else None  # one rank adds it for all
    local = x[:, shape.columns].contiguous()
    if "boft" in context.batch.operations:
        rotated = operators.rotate(x, context, shape)  # type: ignore[arg-type]
        out = torch.cat([linear(part, weight) for part, weight in zip(rotated, own, strict=True)], 1)
        out = out if bias is None else out + bias
        operators.rescale(out, bias, context, shape.widths)  # type: ignore[arg-type]
    else:
        out = linear(local, torch.cat(own), bias)
    for op in operators.ADDITIONS:
        if op in context.batch.operations:
            operators.add(op, local, out, context, shape.widths)  # type: ignore[arg-type]
    if "bias" in context.batch.operations:
        operators.replace_bias(out, bias, context)  # type: ignore[arg-type]
    return out


def put_together(shapes: Sequence[LinearShape], outs: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
    """[rows, outputs] by projection: shares of the input are summed, those of the output are concatenated;
    ranks that hold the same rows must agree."""
    found: dict[str, torch.Tensor] = {}
    for shape, out in zip(shapes, outs, strict=True):
        for part, own in zip(shape.slices, out.split(shape.widths, 1), strict=True):
            whole = found.setdefault(part.name, torch.full((len(out), part.full), torch.nan))
            held = whole[:, part.rows]
            if shape.splits_input:
                held = held.nan_to_num(0) + own
            else:
                assert bool((held.isnan() | (held == own)).all())
                held = own
            whole[:, part.rows] = held
    return found


@pytest.mark.parametrize("ranks", [*(pytest.param(n, marks=pytest.mark.slow) for n in (1, 2)), 4])
@pytest.mark.parametrize("layer", ["qkv", "o", "gate_up", "down"])
@pytest.mark.parametrize("variant", EVERY_KIND, ids=lambda v: v.name)
@pytest.mark.parametrize("architecture", ["llama", pytest.param("qwen2", marks=pytest.mark.slow)])
def test_all_ranks_together_are_the_variant(
    folders: Any, architecture: str, variant: RandomVariant, layer: str, ranks: int
) -> None:
    base, folder, merged = folders(architecture, variant)
    weights, tuned = (dict(random_variants.weights(path)) for path in (base, merged))
    shapes = layers(ranks)[layer]
    x = torch.randn(2 * ROWS, shapes[0].in_full, generator=torch.Generator().manual_seed(1))
    outs = [on_rank(context_of(folder, base, shape), shape, x, weights) for shape in shapes]
    for name, out in put_together(shapes, outs).items():
        for rows, reference in ((slice(0, None, 2), weights), (slice(1, None, 2), tuned)):
            expected = linear(x[rows], reference[f"{name}.weight"], reference.get(f"{name}.bias"))
            torch.testing.assert_close(out[rows], expected, rtol=2e-4, atol=2e-4)


def delta_of_some(base: Path, folder: Path) -> Path:
    """Its k has the base's bias."""
    return random_variants.write(base, folder, RandomDelta("some biases", 8, kept=("k_proj",)))


def boft_of_some(base: Path, folder: Path) -> Path:
    """PEFT with `bias="all"`: q and v are rotated, and every bias was trained, k's too."""
    boft = random_variants.RandomBoft("boft", 7, 1, 8, modules=("q_proj", "v_proj"))
    file = random_variants.write_boft(base, folder, boft, bias="all") / "adapter_model.safetensors"
    tensors = load_file(file)
    for name, weight in random_variants.weights(base):
        module, _, last = name.rpartition(".")
        if last == "bias":
            own = "base_layer.bias" if module.rpartition(".")[2] in boft.modules else "bias"
            tensors[f"base_model.model.{module}.{own}"] = weight + 0.5
    save_file(tensors, file, metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("made", [delta_of_some, boft_of_some])
def test_parts_of_a_product_have_the_bias_that_is_theirs(
    made: Callable[[Path, Path], Path], ranks: int, tmp_path: Path
) -> None:
    """The variant's where it has one, rotated or not, and else the base's."""
    base = random_variants.write_tiny_base(tmp_path / "base", **BASES["qwen2"])
    folder = made(base, tmp_path / "variant")
    merge(base, folder, tmp_path / "merged")
    weights, tuned = (dict(random_variants.weights(path)) for path in (base, tmp_path / "merged"))
    shapes = layers(ranks)["qkv"]
    x = torch.randn(2 * ROWS, HIDDEN, generator=torch.Generator().manual_seed(1))
    outs = [on_rank(context_of(folder, base, shape), shape, x, weights) for shape in shapes]
    for name, out in put_together(shapes, outs).items():
        for rows, reference in ((slice(0, None, 2), weights), (slice(1, None, 2), tuned)):
            expected = linear(x[rows], reference[f"{name}.weight"], reference[f"{name}.bias"])
            torch.testing.assert_close(out[rows], expected, rtol=2e-4, atol=2e-4)


WHOLE_TABLES = RandomDelta("whole tables", 5, tables=1.0)


@pytest.mark.parametrize("variant", [EVERY_KIND[3], WHOLE_TABLES], ids=lambda v: v.name)
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_shards_of_a_vocabulary_are_the_tuned_ones(folders: Any, ranks: int, variant: RandomVariant) -> None:
    """The head is tied: both are one memory, held once."""
    base, folder, merged = folders("llama", variant)
    table = "model.embed_tokens.weight"
    tuned, old = (dict(random_variants.weights(path))[table] for path in (merged, base))
    size, start = VOCABULARY // ranks, 1 << 20
    for rank in range(ranks):
        cut = (rank * size, size, VOCABULARY, HIDDEN)
        embedding = VocabularyShape("model.embed_tokens", *cut, is_head=False, tied=True)
        head = VocabularyShape("lm_head", *cut, is_head=True, tied=True)
        held = pack(
            open_variant(folder, read_model(base), CONFIG), [embedding, head], torch.float32, pinned=False
        )
        (first, second) = (entry.row_at(start) for entry in held.entries)
        if variant is WHOLE_TABLES:
            assert held.size_bytes == size * HIDDEN * 4
            assert torch.equal(held.memory.view(torch.float32).view(size, HIDDEN), tuned[embedding.rows])
            assert first == second == (size, start, 0)
            continue
        codes_bytes = size * HIDDEN
        assert first == second == (size, start, start + aligned(codes_bytes))
        assert held.size_bytes == aligned(codes_bytes) + aligned(4 * size)
        codes = held.memory[:codes_bytes].view(torch.int8).view(size, HIDDEN).double()
        scales = held.memory[aligned(codes_bytes) :][: 4 * size].view(torch.float32).double()
        found = old[embedding.rows].double() + codes * scales[:, None]
        torch.testing.assert_close(found, tuned[embedding.rows].double(), rtol=1e-6, atol=1e-6)


def test_stages_divide_a_variant_and_share_nothing(folders: Any) -> None:
    base, folder, _ = folders("llama", EVERY_KIND[3])
    opened = open_variant(folder, read_model(base), CONFIG)
    norms = [NormShape(f"model.layers.{n}.input_layernorm", HIDDEN) for n in range(2)]
    linears = [s for shapes in layers(1).values() for s in shapes]
    first: list[LayerShape] = [linears[0], norms[0]]
    second: list[LayerShape] = [*linears[1:], norms[1]]
    whole = pack(opened, [*first, *second], torch.float32, pinned=False)
    stages = [pack(opened, part, torch.float32, pinned=False) for part in (first, second)]
    assert whole.size_bytes == sum(stage.size_bytes for stage in stages)
    assert np.array_equal(whole.memory, torch.cat([stage.memory for stage in stages]))
    assert {e.key for e in whole.entries} == {e.key for stage in stages for e in stage.entries}
