"""Weights in the base's place are those of the merged checkpoint, which plain torch makes from the files; and
the base's come back bit for bit."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from profiler.checkpoint import read_model
from profiler.variants.types import VariantKind
from testkit import random_variants
from testkit.random_variants import QWEN2, RandomDelta, weights
from workers.deltas.merge import merge
from workers.kernels.types import Part
from workers.variant_config import VariantConfig
from workers.variants import merged_slot
from workers.variants.alone import BASE_UID
from workers.variants.device import DeviceMemory
from workers.variants.host import pack
from workers.variants.kinds import open_variant
from workers.variants.merged_slot import MergedSlot
from workers.variants.operators import operations_of, table_width
from workers.variants.shapes import LayerShape, LinearShape, NormShape, Slice, VocabularyShape

CPU = torch.device("cpu")
HIDDEN, INNER, Q, KV, VOCABULARY, LAYERS, PADDING = 32, 48, 32, 16, 64, 2, 8
SLOTS, ARENA = 4, 1 << 20
OPERATIONS = ("sparse_delta", "norm", "embedding", "head", "bias")
CONFIG = VariantConfig(SLOTS, ARENA, 1 << 30, 16, kinds=(VariantKind.SPARSE_DELTA, VariantKind.LORA))
DELTAS = {
    1: RandomDelta("full", 1),
    2: RandomDelta("linears", 2, bits=2, full=False, strength=0.08),
    3: RandomDelta("whole tables", 3, tables=1.0),
    4: RandomDelta("some biases", 4, kept=("k_proj",)),
}


def shapes(tied: bool) -> Iterator[LayerShape]:
    yield VocabularyShape("model.embed_tokens", 0, VOCABULARY, VOCABULARY, HIDDEN, False, tied)
    for at in (f"model.layers.{n}" for n in range(LAYERS)):
        attention, mlp = f"{at}.self_attn", f"{at}.mlp"
        yield linear(
            f"{at}.qkv", HIDDEN, {f"{attention}.{n}_proj": w for n, w in (("q", Q), ("k", KV), ("v", KV))}
        )
        yield linear(f"{at}.o", Q, {f"{attention}.o_proj": HIDDEN})
        yield linear(f"{at}.up", HIDDEN, {f"{mlp}.gate_proj": INNER, f"{mlp}.up_proj": INNER})
        yield linear(f"{at}.down", INNER, {f"{mlp}.down_proj": HIDDEN})
        yield NormShape(f"{at}.input_layernorm", HIDDEN)
        yield NormShape(f"{at}.post_attention_layernorm", HIDDEN)
    yield NormShape("model.norm", HIDDEN)
    yield VocabularyShape("lm_head", 0, VOCABULARY, VOCABULARY, HIDDEN, True, tied)


def linear(name: str, inputs: int, outputs: dict[str, int]) -> LinearShape:
    return LinearShape(name, tuple(Slice(n, 0, w, w) for n, w in outputs.items()), 0, inputs, inputs)


Weights = dict[str, torch.Tensor]


def tensors(shape: LayerShape, checkpoint: Weights) -> tuple[torch.Tensor, torch.Tensor | None]:
    """A layer's weight and bias as an engine holds them; rows of the vocabulary are padded with zeros."""
    if isinstance(shape, LinearShape):
        names = [part.name for part in shape.slices]
        biases = [checkpoint[f"{n}.bias"] for n in names if f"{n}.bias" in checkpoint]
        whole = torch.cat([checkpoint[f"{n}.weight"] for n in names])
        return whole, torch.cat(biases) if biases else None
    name = f"{shape.name}.weight"
    found = checkpoint[name] if name in checkpoint else checkpoint["model.embed_tokens.weight"]
    if isinstance(shape, NormShape):
        return found, None
    return torch.cat([found, torch.zeros(PADDING, HIDDEN, dtype=found.dtype)]), None


@dataclass
class Engine:
    """A model's layers with variants 1, 2 and 3 in slots 2, 0 and 1."""

    slot: MergedSlot
    modules: list[tuple[Any, LayerShape]]
    base: Weights
    merged: dict[int, Weights]
    operations: dict[int, frozenset[str]]

    def assert_holds(self, checkpoint: Weights, relative: float = 0.0, absolute: float = 0.0) -> None:
        for module, shape in self.modules:
            for held, want in zip((module.weight, module.bias), tensors(shape, checkpoint), strict=True):
                if want is not None:
                    torch.testing.assert_close(
                        held.data, want.to(held.dtype), rtol=relative, atol=absolute, msg=shape.name
                    )


AT = {1: 2, 2: 0, 3: 1, 4: 3}  # the slot of each variant


def read(folder: Path, dtype: torch.dtype) -> Weights:
    return {name: tensor.to(dtype) for name, tensor in weights(folder)}


def modules_of(base: Weights, tied: bool) -> list[tuple[Any, LayerShape]]:
    """A tied head shares the embedding's parameter, as vLLM has it."""
    made: list[tuple[Any, LayerShape]] = []
    for shape in shapes(tied):
        module, (weight, bias) = torch.nn.Module(), tensors(shape, base)
        parameter = torch.nn.Parameter(weight.clone(), requires_grad=False)
        if shape.name == "lm_head" and tied:
            parameter = made[0][0].weight
        module.register_parameter("weight", parameter)
        module.register_parameter("bias", None if bias is None else torch.nn.Parameter(bias.clone()))
        made.append((module, shape))
    return made


@pytest.fixture(scope="module", params=["tied", "with biases"])
def folders(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root, tied = tmp_path_factory.mktemp("slot"), request.param == "tied"
    config = {} if tied else {**QWEN2, "tie_word_embeddings": False}
    random_variants.write_tiny_base(root / "base", **config)
    for uid, delta in DELTAS.items():
        random_variants.write(root / "base", root / f"{uid}", delta)
        merge(root / "base", root / f"{uid}", root / f"merged-{uid}")
    return root


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=str)
def engine(folders: Path, request: pytest.FixtureRequest) -> Engine:
    dtype = request.param
    spec, base = read_model(folders / "base"), read(folders / "base", dtype)
    tied = "lm_head.weight" not in base
    modules = modules_of(base, tied)
    widths = {
        (shape.name, op): table_width(op, shape)
        for _, shape in modules
        for op in operations_of(shape)
        if op in OPERATIONS
    }
    memory = DeviceMemory(widths, SLOTS, ARENA, CPU)
    operations = {}
    for uid, at in AT.items():
        opened = open_variant(folders / f"{uid}", spec, CONFIG)
        variant = pack(opened, [shape for _, shape in modules], dtype, pinned=False)
        memory.place(at, variant)
        operations[uid] = variant.operations
    hooked = [(module, shape, context(shape, memory)) for module, shape in modules]
    slot = merged_slot.make(hooked, memory, dtype)
    assert slot is not None
    merged = {uid: read(folders / f"merged-{uid}", torch.float32) for uid in DELTAS}
    return Engine(slot, modules, base, merged, operations)


def context(shape: LayerShape, memory: DeviceMemory) -> Any:
    tables = {op: memory.table((shape.name, op)) for op in operations_of(shape) if op in OPERATIONS}
    return SimpleNamespace(arena=memory.arena, tables=tables)


# A weight in bfloat16 is rounded before its delta is added and after it; none is above 8.
ROUNDED = {torch.float32: (0.0, 1e-6), torch.bfloat16: (2**-7, 2**-6)}


def test_the_slot_holds_each_merged_model_in_turn_and_then_the_base(engine: Engine) -> None:
    """The second one leaves norms and tables as they are: those of the first must not stay."""
    tolerance = ROUNDED[engine.modules[0][0].weight.dtype]
    for uid in (1, 2, 3, 4, 1):
        engine.slot.merge(uid, AT[uid])
        assert engine.slot.holds == uid
        engine.assert_holds(engine.merged[uid], *tolerance)
    engine.slot.restore()
    assert engine.slot.holds == BASE_UID
    engine.assert_holds(engine.base)


def test_a_difference_that_stays_in_host_memory_comes_in_pieces(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """16 rows at a time; the last ones are fewer where they do not divide by it."""
    memory, pieces = engine.slot._memory, list[tuple[int, ...]]()
    engine.slot.merge(1, AT[1])
    tables = [whole for whole in engine.slot._wholes if whole.weight.ndim == 2]
    for table in tables:
        table.weight.fill_(torch.nan)

    def of_the_host(slot: int, part: Part, at: int) -> None:
        return None

    copied, in_arena = memory.copy_to, memory.in_arena

    def counted(into: torch.Tensor, slot: int, part: Part, at: int) -> None:
        pieces.append(part.shape)
        with monkeypatch.context() as as_it_is:
            as_it_is.setattr(memory, "in_arena", in_arena)
            copied(into, slot, part, at)

    through = torch.empty(4 * VOCABULARY + 24 * HIDDEN, dtype=torch.uint8)
    monkeypatch.setattr(memory, "in_arena", of_the_host)
    monkeypatch.setattr(memory, "copy_to", counted)
    for table in tables:
        dataclasses.replace(table, through=through).merge(AT[1], memory)
    assert pieces == [(VOCABULARY,), *[(16, HIDDEN)] * (VOCABULARY // 16)] * len(tables)
    engine.assert_holds(engine.merged[1], *ROUNDED[engine.modules[0][0].weight.dtype])


def test_no_weight_changes_its_place(engine: Engine) -> None:
    """A captured graph would not see another."""
    before = [module.weight.data_ptr() for module, _ in engine.modules]
    engine.slot.merge(1, AT[1])
    engine.slot.restore()
    assert [module.weight.data_ptr() for module, _ in engine.modules] == before


def test_the_merged_copy_is_as_large_as_the_base(engine: Engine) -> None:
    parameters = {p.data_ptr(): p for module, _ in engine.modules for p in module.parameters()}
    assert engine.slot.size_bytes == sum(p.nbytes for p in parameters.values())


def test_the_merged_slot_takes_sparse_deltas_only(engine: Engine) -> None:
    for uid, at in AT.items():
        assert engine.slot.takes(uid, at, engine.operations[uid])
    for operations in ({"lora"}, {"norm", "head"}, {"svd_delta", "norm"}, {"sparse_delta", "lora"}):
        assert not engine.slot.takes(1, AT[1], operations)


def put(engine: Engine, slot: int, key: tuple[str, str], row: list[int]) -> None:
    """A variant that has `row` in this table."""
    memory = engine.slot._memory
    begin = memory._begins[key]
    memory._rows[slot][begin : begin + len(row)] = torch.tensor(row)


@pytest.mark.parametrize("key", [("model.layers.0.o", "bias"), ("lm_head", "head")])
def test_a_tensor_that_the_base_lacks_is_not_merged(engine: Engine, key: tuple[str, str]) -> None:
    """A bias where the base has none; a head of its own where the base's is its embedding."""
    tied = engine.modules[0][0].weight is engine.modules[-1][0].weight
    put(engine, AT[1], key, [VOCABULARY, 128, 0] if key[1] == "head" else [VOCABULARY, 128])
    fits = engine.slot.takes(1, AT[1], engine.operations[1])
    assert fits == (key[1] == "head" and not tied)


def test_another_variant_in_the_slot_is_checked_again(engine: Engine) -> None:
    assert engine.slot.takes(1, AT[1], engine.operations[1])
    put(engine, AT[1], ("model.layers.0.o", "bias"), [1, 0])
    assert not engine.slot.takes(4, AT[1], engine.operations[1])


def test_after_a_merge_that_failed_midway_the_base_is_not_taken_for_granted(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: Any) -> None:
        raise RuntimeError("as a launch might")

    with monkeypatch.context() as failing:
        failing.setattr(merged_slot.Whole, "merge", fail)
        with pytest.raises(RuntimeError, match="as a launch"):
            engine.slot.merge(1, AT[1])
    assert engine.slot.holds is None
    engine.slot.restore()
    engine.assert_holds(engine.base)


def test_there_is_none_where_a_weight_is_quantised(engine: Engine, caplog: pytest.LogCaptureFixture) -> None:
    module, shape = engine.modules[2]
    packed = torch.zeros(module.weight.shape, dtype=torch.uint8)
    module.register_parameter("weight", torch.nn.Parameter(packed, requires_grad=False))
    memory = engine.slot._memory
    hooked = [(m, s, context(s, memory)) for m, s in engine.modules]
    assert merged_slot.make(hooked, memory, engine.modules[0][0].weight.dtype) is None
    assert shape.name in caplog.text
