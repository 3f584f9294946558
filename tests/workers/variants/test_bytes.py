"""A variant takes the memory that its format's arithmetic says, within 2%: nothing is padded to the largest
rank, and nothing is held twice."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from controlplane.controller.registration import Limits, read_model_files
from controlplane.planning.variant_room import variant_demand, with_room_for_variants
from controlplane.profiling.keys import served_spec
from controlplane.state.records import Model, Phase
from placement.types import EngineSizes
from profiler.checkpoint import read_model
from profiler.roofline import MOVED_AT_ONCE_BYTES, variant_bytes
from profiler.types import Plan
from profiler.variants.types import HeldBytes, VariantKind, VariantSpec
from testkit import random_variants
from testkit.random_adapters import RandomLora
from testkit.random_variants import EVERY_KIND, RandomBoft, RandomDelta, RandomVariant
from workers.deltas.svd import default_groups
from workers.kernels.sparse_delta.layout import FIELDS, IN_SQUARES, Shape
from workers.kernels.sparse_delta.reference import unpack
from workers.variant_config import VariantConfig
from workers.variants.host import HostVariant, pack
from workers.variants.kinds import open_variant, sparse_delta
from workers.variants.shapes import LayerShape, LinearShape, NormShape, Slice, VocabularyShape

HIDDEN, INNER, KV, VOCABULARY = 1024, 2816, 512, 4096
MODULES = {
    "self_attn.q_proj": (HIDDEN, HIDDEN),
    "self_attn.k_proj": (KV, HIDDEN),
    "self_attn.v_proj": (KV, HIDDEN),
    "self_attn.o_proj": (HIDDEN, HIDDEN),
    "mlp.gate_proj": (INNER, HIDDEN),
    "mlp.up_proj": (INNER, HIDDEN),
    "mlp.down_proj": (HIDDEN, INNER),
}
FUSED = {"qkv": ("q_proj", "k_proj", "v_proj"), "gate_up": ("gate_proj", "up_proj")}
ELEMENTS = sum(out * into for out, into in MODULES.values())


WHOLE_TABLES = RandomDelta("whole tables", 4, tables=1.0)


def layers() -> list[LinearShape]:
    """One hidden layer, whole, as the engine fuses it."""
    parts = [FUSED["qkv"], ("o_proj",), FUSED["gate_up"], ("down_proj",)]
    full = {name.split(".")[1]: (f"model.layers.0.{name}", shape) for name, shape in MODULES.items()}
    found = []
    for names in parts:
        slices = tuple(Slice(full[n][0], 0, full[n][1][0], full[n][1][0]) for n in names)
        into = full[names[0]][1][1]
        found.append(LinearShape("+".join(names), slices, 0, into, into))
    return found


def bytes_by_the_format(variant: RandomVariant) -> float:
    """The bytes of its linear layers in docs/formats.md; factors in bfloat16, scales of rows in float32."""
    match variant:
        case RandomLora(rank=rank, modules=modules):
            shapes = [shape for name, shape in MODULES.items() if name.split(".")[1] in modules]
            return 2 * rank * sum(map(sum, shapes))
        case RandomBoft(factors=factors, block_size=block):
            return sum(2 * factors * into * block + 4 * out for out, into in MODULES.values())
        case RandomDelta(method="sparse", bits=bits):  # half the values, a 2-bit index each, a scale per row
            scales = sum(2 * out for out, _ in MODULES.values())
            return ELEMENTS * (bits / 2 + 1) / 8 + scales
        case RandomDelta():
            return sum(svd_bytes(out, into) for out, into in MODULES.values())
    raise AssertionError(variant)


def svd_bytes(out: int, into: int) -> float:
    """The kernel reads digits of two bits, so three bits take four: 6% more at this width, where 32 ranks
    of three bits are many, and 1.6% in a matrix of 4096 x 4096, where they are few."""
    groups = default_groups((out, into))
    bits = sum(rank * (4 if bits == 3 else bits) for bits, rank in groups)
    ranks = sum(rank for _, rank in groups)
    return (out + into) * (bits + ranks * (16 + 8) / 128) / 8


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_base(tmp_path_factory.mktemp("base") / "base")


def write_base(folder: Path, **config: Any) -> Path:
    sizes = {"hidden_size": HIDDEN, "intermediate_size": INNER, "head_dim": 128, "num_hidden_layers": 1}
    heads = {"num_attention_heads": HIDDEN // 128, "num_key_value_heads": KV // 128}
    return random_variants.write_tiny_base(folder, vocab_size=VOCABULARY, **sizes, **heads, **config)


def rank_of(ranks: int, tied: bool = True) -> list[LayerShape]:
    """All bytes of the base on the first of N TP ranks."""
    norms = [NormShape(f"model.layers.0.{n}_layernorm", HIDDEN) for n in ("input", "post_attention")]
    rows = VOCABULARY // ranks
    tables = [
        VocabularyShape(name, 0, rows, VOCABULARY, HIDDEN, is_head=name == "lm_head", tied=tied)
        for name in ("model.embed_tokens", "lm_head")
    ]
    linears = [sharded(linear, ranks) for linear in layers()]
    return [*linears, *norms, NormShape("model.norm", HIDDEN), *tables]


def sharded(linear: LinearShape, ranks: int) -> LinearShape:
    """Megatron's cut: the outputs of attention and MLP by rows of their inputs, all else by outputs."""
    if linear.name in ("o_proj", "down_proj"):
        return replace(linear, in_size=linear.in_full // ranks)
    return replace(linear, slices=tuple(replace(part, size=part.full // ranks) for part in linear.slices))


@pytest.mark.slow
@pytest.mark.parametrize(("stored", "tied"), [("float32", True), ("bfloat16", True), ("bfloat16", False)])
@pytest.mark.parametrize(
    "variant",
    [
        *EVERY_KIND,
        RandomBoft("boft-b64", 9, 1, 64),
        WHOLE_TABLES,
        RandomDelta("svd alone", 6, "svd", full=False),
    ],
    ids=lambda v: v.name,
)
def test_the_memory_reserved_for_a_variant_holds_it(
    tmp_path: Path, variant: RandomVariant, stored: str, tied: bool
) -> None:
    """In engines of either type, however it is stored: otherwise a restarted engine has no room. An embedding
    that is not the head, too, stays in host memory, and takes none."""
    base = write_base(tmp_path / "base", torch_dtype=stored, tie_word_embeddings=tied)
    folder = random_variants.write(base, tmp_path / variant.name, variant)
    if isinstance(variant, RandomBoft):
        in_type(folder / "adapter_model.safetensors", getattr(torch, stored))
    asked = Model("v", 2, Phase.PROFILING, base="b", adapter=str(folder))
    registered = Model("b", 1, Phase.READY, source=str(base), spec=read_model(base))
    ready = read_model_files(asked, registered, Limits((tmp_path,), 16), Path)
    sizes = EngineSizes(variant_slots=1, lora_rank=1)
    for dtype, ranks in itertools.product((torch.float32, torch.bfloat16), (1, 2, 4)):
        opened = open_variant(folder, read_model(base), VariantConfig(1, 1 << 30, 1 << 30, 16))
        taken = pack(opened, rank_of(ranks, tied), dtype, pinned=False).device_bytes
        spec = served_spec(read_model(base), str(dtype).removeprefix("torch."))
        plan = with_room_for_variants(Plan(1, (1,), "none", 64, 64, 0, 0), spec, sizes, [ready])
        plan = replace(plan, tensor_parallel=ranks)  # as the search does
        set_aside = variant_bytes(spec, plan, 0) - MOVED_AT_ONCE_BYTES
        assert taken <= set_aside, f"{dtype}, TP={ranks}: {taken} of {set_aside}"
        assert ranks > 1 or set_aside <= 1.1 * taken  # tables are sharded, and set aside as wholes


def test_differences_are_planned_for_with_their_own_bytes(base: Path) -> None:
    """An embedding's stay on the host, unless the head is the same."""
    table, norms, bytes_each = VOCABULARY * HIDDEN, 5 * HIDDEN, VOCABULARY * (HIDDEN + 4)
    told = VariantSpec(VariantKind.SPARSE_DELTA, 0, {}, replaces_embedding=True)
    for tied, head, held, expected in (
        (False, True, HeldBytes(norms, 0, 0, bytes_each, bytes_each), bytes_each),
        (False, False, HeldBytes(norms, 0, 0, bytes_each), 0),
        (True, False, HeldBytes(norms, 0, 0, bytes_each), bytes_each),
        (True, True, HeldBytes(norms, 0, 0, bytes_each, bytes_each), bytes_each),
        (False, True, HeldBytes(norms + table, 0, 0, bytes_each), 2 * table),  # a whole head
        (False, True, HeldBytes(norms + table, 0, 0, 0, bytes_each), bytes_each),  # a whole embedding
    ):
        served = replace(served_spec(read_model(base), "bfloat16"), tied=tied)
        spec = replace(told, replaces_head=head, held=held)
        assert variant_demand(spec, served).full == 2 * norms + expected


@pytest.mark.parametrize(
    ("tied", "head", "stays"),
    [(False, True, True), (False, False, True), (True, False, False), (True, True, True)],
)
def test_an_embedding_that_is_not_the_head_is_not_planned_for(
    base: Path, tied: bool, head: bool, stays: bool
) -> None:
    """The stored form counts where an old record does not tell the engine's form."""
    table, others = VOCABULARY * HIDDEN, 5 * HIDDEN
    served = replace(served_spec(read_model(base), "bfloat16"), tied=tied)
    told = VariantSpec(
        VariantKind.SPARSE_DELTA,
        weight_bytes=2 * (table + others),
        modules={},
        full_bytes=2 * (table + others),
        replaces_embedding=True,
        replaces_head=head,
        held=HeldBytes(table + others, 0, 0),
    )
    values = others if stays else table + others
    assert variant_demand(told, served).full == 2 * values
    assert variant_demand(replace(told, held=None), served).full == 2 * (table + others)


def in_type(path: Path, dtype: torch.dtype) -> None:
    save_file({name: tensor.to(dtype) for name, tensor in load_file(path).items()}, path)


@pytest.mark.slow
@pytest.mark.parametrize("variant", EVERY_KIND, ids=lambda v: v.name)
def test_a_slot_takes_the_format_s_bytes(base: Path, tmp_path: Path, variant: RandomVariant) -> None:
    folder = random_variants.write(base, tmp_path / variant.name, variant)
    opened = open_variant(folder, read_model(base), VariantConfig(1, 1 << 30, 1 << 30, 16))
    held = pack(opened, layers(), torch.bfloat16, pinned=False).size_bytes
    assert held == pytest.approx(bytes_by_the_format(variant), rel=0.02)


@pytest.mark.parametrize("bits", [4, 2])
def test_in_squares_a_delta_takes_as_many_bytes_and_means_the_same(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bits: int
) -> None:
    folder = random_variants.write(base, tmp_path / "delta", RandomDelta("delta", 3, "sparse", bits))
    opened = open_variant(folder, read_model(base), VariantConfig(1, 1 << 30, 1 << 30, 16))
    rows = pack(opened, layers(), torch.bfloat16, pinned=False)
    monkeypatch.setattr(sparse_delta, "in_squares", lambda *layer: True)
    squares = pack(opened, layers(), torch.bfloat16, pinned=False)
    assert squares.size_bytes == rows.size_bytes
    for layer, first, second in zip(layers(), entries_of(rows), entries_of(squares), strict=True):
        for i, width in enumerate(layer.widths):
            deltas = [slice_of(each, i, width, layer.in_size) for each in (first, second)]
            assert torch.equal(*deltas)
            assert deltas[0].any()


def entries_of(held: HostVariant) -> list[tuple[torch.Tensor, tuple[int, ...]]]:
    """For each layer's sparse delta, its memory and its table row there."""
    return [(held.memory, entry.row_at(0)) for entry in held.entries if entry.key[1] == "sparse_delta"]


def slice_of(entry: tuple[torch.Tensor, tuple[int, ...]], i: int, outputs: int, inputs: int) -> torch.Tensor:
    memory, row = entry
    bits, *places, scales = row[FIELDS * i : FIELDS * (i + 1)]
    shape = Shape(outputs, inputs, bits % IN_SQUARES, scales, squares=bits >= IN_SQUARES)
    return unpack(memory, shape, places)
