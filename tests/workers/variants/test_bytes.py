"""A variant takes the memory that its format's arithmetic says, within 2%: nothing is padded to the largest
rank, and nothing is held twice."""

from __future__ import annotations

from pathlib import Path

import pytest
import random_variants
import torch
from random_adapters import RandomLora
from random_variants import EVERY_KIND, RandomBoft, RandomDelta, RandomVariant

from workers.deltas.svd import default_groups
from workers.variant_config import VariantConfig
from workers.variants.host import pack
from workers.variants.kinds import open_variant
from workers.variants.shapes import LinearShape, Slice

HIDDEN, INNER, KV = 1024, 2816, 512
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
    """What docs/formats.md says its linear layers take; factors in bfloat16, scales of rows in float32."""
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
    sizes = {"hidden_size": HIDDEN, "intermediate_size": INNER, "head_dim": 128, "num_hidden_layers": 1}
    heads = {"num_attention_heads": HIDDEN // 128, "num_key_value_heads": KV // 128}
    return random_variants.write_tiny_base(tmp_path_factory.mktemp("base") / "base", **sizes, **heads)


@pytest.mark.slow
@pytest.mark.parametrize("variant", EVERY_KIND, ids=lambda v: v.name)
def test_a_slot_takes_what_the_format_says(base: Path, tmp_path: Path, variant: RandomVariant) -> None:
    folder = random_variants.write(base, tmp_path / variant.name, variant)
    opened = open_variant(folder, base, VariantConfig(1, 1 << 30, 1 << 30, 16))
    held = pack(opened, layers(), torch.bfloat16, pinned=False).size_bytes
    assert held == pytest.approx(bytes_by_the_format(variant), rel=0.02)
