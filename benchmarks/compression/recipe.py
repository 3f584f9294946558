"""One training of a model on a task: all of its weights, or a LoRA adapter of rank 16.

AdamW on float32 copies of weights in bfloat16, no weight decay; the learning rate climbs for a twentieth of
the steps, then falls to zero as a cosine; gradients are clipped to norm 1. A batch has as many examples as
fit its tokens, padded on the right; only answers are learned.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.compression import lora, models
from benchmarks.compression.tasks import Task, task_named

RANK = 16
WARM_UP = 0.05
CLIP = 1.0
PROBED = 500  # examples by which a task's room is measured


@dataclass(frozen=True)
class Run:
    """The training: `rank` None: all weights. `tokens` counts padding; `batch_tokens` make a step."""

    task: str
    seed: int
    lr: float
    tokens: int
    batch_tokens: int = 4096
    rank: int | None = None

    @property
    def name(self) -> str:
        kind = "full" if self.rank is None else f"lora{self.rank}-{self.lr:g}"
        return f"{self.task}-{kind}-seed{self.seed}"


def carry_out(run: Run, base: Path, target: Path, device: str, tested: int) -> dict[str, Any]:
    """Train, write the checkpoint or the adapter to `target`, and say what came out."""
    began = time.perf_counter()
    torch.manual_seed(run.seed)
    task = task_named(run.task)
    model, tokenizer = models.load(base, device)
    if run.rank is not None:
        lora.adapt(model, run.rank)
    batches = list(_batches(run, task, tokenizer))
    prepared = time.perf_counter()
    losses = _train(model, batches, run.lr, device)
    trained = time.perf_counter()
    (models if run.rank is None else lora).save(model, base, target)
    model.eval()
    accuracy = models.accuracy(model, tokenizer, task.held_out(run.seed, tested), task.tokens)
    return {
        **asdict(run),
        "name": run.name,
        "steps": len(batches),
        "rows": len(batches[0]),
        "parameters": sum(p.numel() for p in model.parameters() if p.requires_grad),
        "loss_first": losses[0],
        "loss_last": sum(losses[-10:]) / len(losses[-10:]),
        "accuracy": accuracy,
        "tested": tested,
        "prepare_s": prepared - began,
        "train_s": trained - prepared,
        "test_s": time.perf_counter() - trained,
        "peak_bytes": torch.cuda.max_memory_allocated() if device == "cuda" else None,
    }


def _batches(run: Run, task: Task, tokenizer: Any) -> Iterator[list[models.Tokens]]:
    """The batches have one number of rows, so that every step weighs alike."""
    probe = models.tokenized(tokenizer, task.train(run.seed, PROBED))
    rows = max(1, run.batch_tokens // max(map(len, probe)))
    steps = max(1, run.tokens // run.batch_tokens)
    examples = task.train(run.seed, rows * steps)
    tokens = models.tokenized(tokenizer, examples)
    for start in range(0, len(tokens), rows):
        yield tokens[start : start + rows]


def _train(model: Any, batches: Sequence[Sequence[models.Tokens]], lr: float, device: str) -> list[float]:
    """The loss of every step."""
    weights = [p for p in model.parameters() if p.requires_grad]
    masters = [p.detach().float().clone() for p in weights]
    for master in masters:
        master.grad = torch.zeros_like(master)
    optimizer = torch.optim.AdamW(masters, lr=lr, betas=(0.9, 0.95), weight_decay=0.0, fused=device == "cuda")
    model.train()
    losses = []
    for step, batch in enumerate(batches):
        for group in optimizer.param_groups:
            group["lr"] = lr * _share(step, len(batches))
        padded = models.right_padded(batch, device)
        logits = models.answer_logits(model, padded)
        loss = torch.nn.functional.cross_entropy(logits.float(), padded.answers)
        loss.backward()
        torch._foreach_copy_([master.grad for master in masters], [p.grad for p in weights])
        for p in weights:
            p.grad = None
        torch.nn.utils.clip_grad_norm_(masters, CLIP)
        optimizer.step()
        with torch.no_grad():
            torch._foreach_copy_(weights, masters)
        losses.append(loss.detach())
    return torch.stack(losses).tolist()


def _share(step: int, steps: int) -> float:
    """The share of the highest learning rate."""
    warm = max(1, round(WARM_UP * steps))
    if step < warm:
        return (step + 1) / warm
    return 0.5 * (1 + math.cos(math.pi * (step - warm) / max(1, steps - warm)))
