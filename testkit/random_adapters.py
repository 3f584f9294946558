"""PEFT LoRA folders with random weights, and the base model with one merged into it."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class RandomLora:
    """`strength` is |(alpha/r) B A| over |W| (Frobenius): large enough to change the text, small enough
    that it stays text."""

    name: str
    rank: int
    seed: int
    modules: tuple[str, ...] = ATTENTION + MLP
    strength: float = 0.15
    rank_stabilised: bool = False

    @property
    def alpha(self) -> int:
        return 2 * self.rank


def write(base: Path, folder: Path, lora: RandomLora) -> Path:
    """Write `folder` as PEFT's `save_pretrained` would."""
    generator = torch.Generator().manual_seed(lora.seed)
    tensors: dict[str, torch.Tensor] = {}
    for name, weight in _targets(base, lora.modules):
        rows, columns = weight.shape
        a = torch.randn(lora.rank, columns, generator=generator) / columns**0.5
        b = torch.randn(rows, lora.rank, generator=generator)
        scale = lora.alpha / (lora.rank**0.5 if lora.rank_stabilised else lora.rank)
        b *= lora.strength * weight.norm() / (scale * (b @ a)).norm()
        tensors[f"base_model.model.{name}.lora_A.weight"] = a
        tensors[f"base_model.model.{name}.lora_B.weight"] = b.contiguous()
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(base),
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": list(lora.modules),
        "use_rslora": lora.rank_stabilised,
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def _targets(base: Path, modules: tuple[str, ...]) -> Iterable[tuple[str, torch.Tensor]]:
    stored = [load_file(path) for path in sorted(base.glob("*.safetensors"))]
    for name, weight in (item for part in stored for item in part.items()):
        module = name.removesuffix(".weight")
        if module.rpartition(".")[2] in modules:
            yield module, weight.float()


@torch.inference_mode()
def merged_model(base: Path, adapter: Path | None) -> Any:
    """In transformers and float32, the base with weights W + (alpha/r) B A; with W for no adapter."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()
    if adapter is None:
        return model
    config = json.loads((adapter / "adapter_config.json").read_text())
    scale = config["lora_alpha"] / (config["r"] ** 0.5 if config["use_rslora"] else config["r"])
    pairs = load_file(adapter / "adapter_model.safetensors")
    weights = model.state_dict()
    for key, a in pairs.items():
        if key.endswith(".lora_A.weight"):
            b = pairs[key.replace("lora_A", "lora_B")]
            target = key.removeprefix("base_model.model.").replace("lora_A.weight", "weight")
            weights[target] += scale * (b @ a)  # shared with the model
    return model


def falls_short(model: Any, prompt: list[int], answer: list[int]) -> float:
    """By how much the worst token is less likely than the best one there, in log-probability."""
    expected = log_probabilities(model, prompt, answer)
    chosen = expected[torch.arange(len(answer)), torch.tensor(answer)]
    return float((expected.max(dim=-1).values - chosen).max())


@torch.inference_mode()
def log_probabilities(model: Any, prompt: list[int], answer: list[int]) -> torch.Tensor:
    """[len(answer), vocabulary]: what `model` gives for each token of the answer, given those before."""
    logits = model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
    return torch.log_softmax(logits.double(), dim=-1)
