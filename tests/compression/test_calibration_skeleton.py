"""Blocks that are run one at a time give the hidden states that transformers' whole model gives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from profiler.errors import CheckpointError
from testkit.tiny_families import TINY, Tiny
from workers.compression.calibration.skeleton import Skeleton

MIXTURES = ("Mixtral", "Qwen2Moe", "Qwen3Moe")
DENSE = [tiny for tiny in TINY if tiny.family not in MIXTURES]
IDS = torch.randint(3, 40, (2, 21), generator=torch.Generator().manual_seed(0))


def written(tiny: Tiny, folder: Path) -> Path:
    """Weights large enough for attention not to be uniform."""
    torch.manual_seed(3)
    return tiny.write(folder, initializer_range=0.3)


def block_weights(tensors: dict[str, torch.Tensor], prefix: str, layer: int) -> dict[str, torch.Tensor]:
    at = f"{prefix}{layer}."
    return {name.removeprefix(at): tensor for name, tensor in tensors.items() if name.startswith(at)}


def hidden_states(folder: Path, ids: torch.Tensor) -> list[torch.Tensor]:
    """The inputs of each block, and the outputs of the last one, before the last norm."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    base: Any = model.base_model
    norm = (
        base.norm if hasattr(base, "norm") else [m for m in base.children() if "Norm" in type(m).__name__][-1]
    )
    last: list[torch.Tensor] = []
    norm.register_forward_pre_hook(lambda module, args: last.append(args[0]))
    with torch.no_grad():
        states = model(ids, output_hidden_states=True, use_cache=False).hidden_states
    return [*states[:-1], last[0]]


@pytest.mark.parametrize("tiny", DENSE, ids=lambda tiny: tiny.id)
def test_each_block_gives_what_it_gives_in_the_whole_model(tiny: Tiny, tmp_path: Path) -> None:
    folder = written(tiny, tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    expected = hidden_states(folder, IDS)
    skeleton = Skeleton(folder, "cpu", torch.float32)
    with skeleton.embedded(tensors[skeleton.embedding]):
        hidden = skeleton.embed(IDS)
    torch.testing.assert_close(hidden, expected[0])
    for layer in range(skeleton.layers):
        skeleton.fill(layer, block_weights(tensors, skeleton.prefix, layer))
        hidden = skeleton.run(layer, hidden)
        skeleton.drop(layer)
        torch.testing.assert_close(hidden, expected[layer + 1], rtol=1e-4, atol=1e-4)


def test_only_the_filled_block_has_weights_in_memory(tmp_path: Path) -> None:
    folder = written(DENSE[0], tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    skeleton = Skeleton(folder, "cpu", torch.float32)

    def in_memory() -> list[int]:
        layers = range(skeleton.layers)
        return [n for n in layers if any(not p.is_meta for p in skeleton.module(n, "").parameters())]

    assert in_memory() == []
    skeleton.fill(1, block_weights(tensors, skeleton.prefix, 1))
    assert in_memory() == [1]
    skeleton.drop(1)
    assert in_memory() == []


def test_a_block_with_other_tensors_is_refused_by_name(tmp_path: Path) -> None:
    folder = written(DENSE[0], tmp_path / "model")
    skeleton = Skeleton(folder, "cpu", torch.float32)
    weights = block_weights(load_file(folder / "model.safetensors"), skeleton.prefix, 0)
    missing = {name: t for name, t in weights.items() if name != "mlp.up_proj.weight"}
    with pytest.raises(CheckpointError, match=r"mlp\.up_proj\.weight"):
        skeleton.fill(0, missing)
    with pytest.raises(CheckpointError, match=r"layers\.0\.mlp\.up_proj.*\(24, 16\).*\(3, 3\)"):
        skeleton.fill(0, {**weights, "mlp.up_proj.weight": torch.zeros(3, 3)})
    with pytest.raises(CheckpointError, match=r"no module mlp\.sideways"):
        skeleton.module(0, "mlp.sideways")


def test_stored_rotary_tables_are_left_out(tmp_path: Path) -> None:
    folder = written(DENSE[0], tmp_path / "model")
    skeleton = Skeleton(folder, "cpu", torch.float32)
    weights = block_weights(load_file(folder / "model.safetensors"), skeleton.prefix, 0)
    skeleton.fill(0, {**weights, "self_attn.rotary_emb.inv_freq": torch.ones(2)})


@pytest.mark.parametrize("family", MIXTURES)
def test_mixtures_of_experts_are_refused(family: str, tmp_path: Path) -> None:
    """transformers keeps their experts in one tensor, checkpoints in many."""
    tiny = next(tiny for tiny in TINY if tiny.family == family)
    folder = written(tiny, tmp_path / "model")
    skeleton = Skeleton(folder, "cpu", torch.float32)
    weights = block_weights(load_file(folder / "model.safetensors"), skeleton.prefix, 0)
    with pytest.raises(CheckpointError, match="cannot run this architecture"):
        skeleton.fill(0, weights)
