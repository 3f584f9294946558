"""The Gram matrices of calibration against those that hooks take from transformers' whole model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from profiler.errors import CheckpointError
from testkit.tiny_families import TINY, Tiny
from workers.compression.calibration.blocks import GROUPS, CalibratedBlocks, open_blocks
from workers.compression.calibration.texts import Texts

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LENGTHS = (21, 5, 13, 21, 1)
FAMILIES = [
    tiny for tiny in TINY if tiny.family in ("Llama", "Mistral", "Qwen2", "Qwen3", "Gemma2", "Gemma3")
]
LLAMA = FAMILIES[0]
MODULES = [module for group in GROUPS for module in group]


@dataclass
class Loaded:
    """A whole checkpoint in memory, which is tiny."""

    folder: Path
    tensors: dict[str, torch.Tensor]

    def tensor(self, name: str) -> torch.Tensor:
        return self.tensors[name]

    def block(self, layer: int) -> dict[str, torch.Tensor]:
        at = f"model.layers.{layer}."
        return {name.removeprefix(at): t for name, t in self.tensors.items() if name.startswith(at)}


def loaded(tiny: Tiny, folder: Path) -> Loaded:
    """Weights large enough for attention not to be uniform."""
    torch.manual_seed(5)
    tiny.write(folder, initializer_range=0.3)
    return Loaded(folder, load_file(folder / "model.safetensors"))


def texts() -> Texts:
    generator = torch.Generator().manual_seed(1)
    return Texts(tuple(torch.randint(3, 40, (n,), generator=generator) for n in LENGTHS), "these rows")


def grams_of_the_whole(
    checkpoint: Loaded, changed: dict[str, torch.Tensor], dtype: torch.dtype = torch.float32
) -> dict[str, torch.Tensor]:
    """X X^T / tokens in float64 of every module, row by row, with some weights changed."""
    model: Any = AutoModelForCausalLM.from_pretrained(checkpoint.folder, dtype=dtype)
    model.load_state_dict({f"{name}.weight": weight for name, weight in changed.items()}, strict=False)
    sums: dict[str, torch.Tensor] = {}

    def hook(name: str) -> Any:
        def add(module: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> None:
            inputs = args[0][0].double()
            sums[name] = sums.get(name, torch.zeros(())) + inputs.T @ inputs / sum(LENGTHS)

        return add

    for layer in range(3):
        for module in MODULES:
            name = f"model.layers.{layer}.{module}"
            model.get_submodule(name).register_forward_pre_hook(hook(name))
    with torch.no_grad():
        for row in texts().rows:
            model(row[None])
    return sums


def assert_grams(blocks: CalibratedBlocks, layer: int, expected: dict[str, torch.Tensor]) -> None:
    for group in blocks.groups:
        found = blocks.inputs(group)
        assert found.tokens == sum(LENGTHS)
        assert found.gram.dtype == torch.float32
        for module in group:
            want = expected[f"model.layers.{layer}.{module}"].float()
            torch.testing.assert_close(found.gram.cpu(), want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("tiny", FAMILIES, ids=lambda tiny: tiny.id)
def test_inputs_are_those_in_the_whole_model(tiny: Tiny, tmp_path: Path) -> None:
    checkpoint = loaded(tiny, tmp_path / "model")
    expected = grams_of_the_whole(checkpoint, {})
    blocks = open_blocks(checkpoint, texts(), DEVICE, torch.float32)
    for layer in range(3):
        blocks.enter(layer, checkpoint.block(layer))
        assert_grams(blocks, layer, expected)
        blocks.leave()


@pytest.mark.parametrize("module", MODULES)
def test_layers_behind_a_compressed_one_get_its_outputs(module: str, tmp_path: Path) -> None:
    checkpoint = loaded(LLAMA, tmp_path / "model")
    weight = torch.randn_like(checkpoint.block(0)[f"{module}.weight"])
    before = grams_of_the_whole(checkpoint, {})
    after = grams_of_the_whole(checkpoint, {f"model.layers.0.{module}": weight})
    assert not torch.allclose(before["model.layers.1.mlp.down_proj"], after["model.layers.1.mlp.down_proj"])
    blocks = open_blocks(checkpoint, texts(), DEVICE, torch.float32)
    blocks.enter(0, checkpoint.block(0))
    assert_grams(blocks, 0, before)
    blocks.replace(module, weight)
    assert_grams(blocks, 0, after)
    blocks.leave()
    blocks.enter(1, checkpoint.block(1))
    assert_grams(blocks, 1, after)


def test_a_resumed_job_need_not_take_inputs_of_blocks_that_are_done(tmp_path: Path) -> None:
    checkpoint = loaded(LLAMA, tmp_path / "model")
    weights = {f"model.layers.0.{m}": torch.randn_like(checkpoint.block(0)[f"{m}.weight"]) for m in MODULES}
    blocks = open_blocks(checkpoint, texts(), DEVICE, torch.float32)
    blocks.enter(0, checkpoint.block(0))
    for module in MODULES:
        blocks.replace(module, weights[f"model.layers.0.{module}"])
    blocks.leave()
    blocks.enter(1, checkpoint.block(1))
    assert_grams(blocks, 1, grams_of_the_whole(checkpoint, weights))


def test_half_precision_is_summed_in_float32(tmp_path: Path) -> None:
    checkpoint = loaded(LLAMA, tmp_path / "model")
    expected = grams_of_the_whole(checkpoint, {}, torch.bfloat16)["model.layers.0.mlp.down_proj"].float()
    blocks = open_blocks(checkpoint, texts(), DEVICE, torch.bfloat16)
    blocks.enter(0, checkpoint.block(0))
    found = blocks.inputs(("mlp.down_proj",)).gram.cpu().cpu()
    # Rows in batches round activations otherwise than rows alone, by bfloat16's 2^-8.
    assert torch.linalg.norm(found - expected) <= 0.02 * torch.linalg.norm(expected)


def test_calls_out_of_order_are_refused(tmp_path: Path) -> None:
    checkpoint = loaded(LLAMA, tmp_path / "model")
    blocks = open_blocks(checkpoint, texts(), DEVICE, torch.float32)
    with pytest.raises(ValueError, match="expected block 0 to be entered"):
        blocks.enter(1, checkpoint.block(1))
    for call in (lambda: blocks.inputs(GROUPS[0]), lambda: blocks.replace("x", torch.ones(1)), blocks.leave):
        with pytest.raises(ValueError, match=r"expected enter\(0, weights\) before"):
            call()
    blocks.enter(0, checkpoint.block(0))
    with pytest.raises(ValueError, match="expected block 0 to be left"):
        blocks.enter(1, checkpoint.block(1))
    with pytest.raises(ValueError, match="expected modules of one of"):
        blocks.inputs(("self_attn.q_proj", "mlp.up_proj"))
    for layer in (1, 2, 3):
        blocks.leave()
        if layer < 3:
            blocks.enter(layer, checkpoint.block(layer))
    with pytest.raises(ValueError, match="block 3"):
        blocks.enter(3, checkpoint.block(2))


def test_inputs_that_are_not_finite_are_named(tmp_path: Path) -> None:
    checkpoint = loaded(LLAMA, tmp_path / "model")
    blocks = open_blocks(checkpoint, texts(), DEVICE, torch.float32)
    blocks.enter(0, checkpoint.block(0))
    blocks.replace("self_attn.v_proj", torch.full((8, 16), float("inf")))
    with pytest.raises(CheckpointError, match=r"model\.layers\.0\.self_attn\.o_proj are not finite"):
        blocks.inputs(("self_attn.o_proj",))


def test_tokens_that_the_model_does_not_have_are_refused(tmp_path: Path) -> None:
    checkpoint = loaded(LLAMA, tmp_path / "model")
    rows = Texts((torch.tensor([3, 40]),), "these rows")
    with pytest.raises(CheckpointError, match=r"turns these rows into token 40.*has only 40 rows"):
        open_blocks(checkpoint, rows, DEVICE, torch.float32)
