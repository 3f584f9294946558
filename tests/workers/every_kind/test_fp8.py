"""A base held in fp8 and variants of every kind on it in one batch: each answers as transformers does whose
linear layers are quantized by hand, with what the variant changes added unquantized."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.nn import functional
from transformers import AutoModelForCausalLM

from testkit import random_adapters
from testkit.workers import variant_lab
from testkit.workers.variant_lab import BASE, KINDS, LAYERS, MODELS, PROMPTS, Answer, Checkpoints, Lab

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

# The engine computes in float16, so some inputs round to another of fp8's few numbers than in float32: that
# alone moves log-probabilities of this reference by 0.05 in the mean, quantizing by 0.07.
MEAN_TOLERANCE = 0.1
LARGEST = 448.0  # of e4m3


def rounded(x: torch.Tensor) -> torch.Tensor:
    """[rows, n] in e4m3 with a scale for each row, as float32."""
    scale = x.abs().amax(dim=-1, keepdim=True).clamp(min=1e-12) / LARGEST
    return (x / scale).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn).float() * scale


class ByHand(torch.nn.Module):
    """Rounded weights meet rounded inputs; `change` meets the inputs as they are."""

    def __init__(self, weight: torch.Tensor, change: torch.Tensor) -> None:
        super().__init__()
        self.rounded, self.change = rounded(weight.half().float()), change

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(rounded(x), self.rounded) + functional.linear(x, self.change)


def reference(checkpoints: Checkpoints, model: str) -> Any:
    """The merged model of transformers, its hidden layers' linears by hand."""
    base, merged = (
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        for folder in (checkpoints.base, checkpoints.merged[model])
    )
    for block, same in zip(merged.model.layers, base.model.layers, strict=True):
        for name, linear in list(block.named_modules()):
            if isinstance(linear, torch.nn.Linear):
                weight = same.get_submodule(name).weight.detach()
                block.set_submodule(name, ByHand(weight, linear.weight.detach() - weight))
    return merged


@pytest.fixture(scope="module")
def lab(checkpoints: Checkpoints) -> Iterator[Lab]:
    plain = variant_lab.engine_config(checkpoints.base, 1, (LAYERS,))
    config = dataclasses.replace(plain, dtype="float16", quantization="fp8")
    with variant_lab.running(checkpoints, config) as lab:
        yield lab


def errors(model: Any, answers: list[Answer]) -> torch.Tensor:
    """|difference| of each chosen token's log-probability."""
    found = []
    for answer in answers:
        expected = random_adapters.log_probabilities(model, answer.prompt, answer.tokens)
        chosen = expected[torch.arange(len(answer.tokens)), torch.tensor(answer.tokens)]
        found.append((chosen - torch.tensor(answer.logprobs)).abs())
    return torch.cat(found)


def test_variants_on_a_base_in_fp8(lab: Lab) -> None:
    """Each is nearer to its own reference than to the base's, and all together nearer to the quantized ones
    than to those that are not."""
    rows = [(model, prompt) for prompt in PROMPTS for model in MODELS]
    for name in KINDS:
        lab.run(lab.worker.load_variant(lab.checkpoints.variants[name]))
    answers = lab.run(lab.ask_all(rows, True))
    base, by_hand, unquantized = reference(lab.checkpoints, BASE), [], []
    for model in MODELS:
        mine = [a for a, (asked, _) in zip(answers, rows, strict=True) if asked == model]
        plain = AutoModelForCausalLM.from_pretrained(lab.checkpoints.merged[model], dtype=torch.float32)
        by_hand.append(errors(reference(lab.checkpoints, model), mine))
        unquantized.append(errors(plain.eval(), mine))
        own, others = by_hand[-1].mean(), errors(base, mine).mean()
        print(f"{model}: {own:.3f} from its own, {others:.3f} from the base")
        assert own < MEAN_TOLERANCE
        assert model == BASE or own < others / 2
    nearer, farther = (float(torch.cat(found).mean()) for found in (by_hand, unquantized))
    print(f"{nearer:.3f} from quantized references, {farther:.3f} from unquantized ones")
    assert nearer < 0.85 * farther
