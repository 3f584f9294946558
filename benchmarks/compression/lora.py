"""LoRA by hand, in PEFT's file format: y = W x + (alpha / r) B A x, with W frozen."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

ALPHA_PER_RANK = 2


class LoraLinear(torch.nn.Module):
    """A frozen linear layer [out, in] with A [rank, in], drawn as PEFT does, and B [out, rank] of zeros."""

    def __init__(self, linear: torch.nn.Linear, rank: int) -> None:
        super().__init__()
        self.linear = linear
        self.a = torch.nn.Parameter(linear.weight.new_empty(rank, linear.in_features))
        self.b = torch.nn.Parameter(linear.weight.new_zeros(linear.out_features, rank))
        torch.nn.init.kaiming_uniform_(self.a, a=5**0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide: torch.Tensor = self.linear(x)
        low = torch.nn.functional.linear(x, self.a)
        return wide + ALPHA_PER_RANK * torch.nn.functional.linear(low, self.b)


def adapt(model: Any, rank: int) -> None:
    """Freeze the model and add an adapter to every linear layer of its blocks."""
    model.requires_grad_(False)
    linears = [name for name, module in model.named_modules() if _in_block(name, module)]
    for name in linears:
        parent, _, last = name.rpartition(".")
        owner = model.get_submodule(parent)
        setattr(owner, last, LoraLinear(getattr(owner, last), rank))


def _in_block(name: str, module: torch.nn.Module) -> bool:
    return isinstance(module, torch.nn.Linear) and ".layers." in name


def adapters(model: Any) -> Iterator[tuple[str, LoraLinear]]:
    for name, module in model.named_modules():
        if isinstance(module, LoraLinear):
            yield name, module


def save(model: Any, base: Path, target: Path) -> None:
    """`adapter_config.json` and `adapter_model.safetensors`, in bfloat16."""
    from safetensors.torch import save_file

    target.mkdir(parents=True)
    tensors, names, rank = {}, set(), 0
    for name, module in adapters(model):
        names.add(name.rpartition(".")[2])
        rank = module.a.shape[0]
        for part, tensor in (("A", module.a), ("B", module.b)):
            stored = tensor.detach().to("cpu", torch.bfloat16).contiguous()
            tensors[f"base_model.model.{name}.lora_{part}.weight"] = stored
    save_file(tensors, target / "adapter_model.safetensors", metadata={"format": "pt"})
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(base),
        "r": rank,
        "lora_alpha": ALPHA_PER_RANK * rank,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "use_rslora": False,
        "use_dora": False,
        "target_modules": sorted(names),
        "inference_mode": True,
    }
    (target / "adapter_config.json").write_text(json.dumps(config, indent=1))
