"""Times the methods on layers of a 7B model: seconds and peak memory a layer, and what a whole model takes.

    python -m benchmarks.compression.speed --out FILE [--shapes llama-2-7b] [--device cuda] [--limit-s 480]
        [--only "deltamix-1/16;deltacompress-4"] [--texts 256]

Weights and inputs are random (a delta with a decaying spectrum, inputs with correlated channels of unlike
sizes), so times count and errors do not. Each shape is timed once for each method, after a warm-up on a small
layer; a model's time is that of its layers, one after another, plus the calibration texts' run through its
blocks (128 texts of 2,048 tokens, as DeltaMix has them; DeltaZip takes 256), of which one block is timed.
Reading and writing files are not in it. DeltaZip gives 30 minutes for 7B on an RTX 3090, DeltaMix 1.2 hours
on an L20.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks import rehearsing
from benchmarks.compression import contenders, models
from workers.compression.types import Inputs, Problem

MODULE = "benchmarks.compression.speed"
PAPERS = {
    "deltacompress": {"device": "RTX 3090", "s": 30 * 60},
    "deltamix": {"device": "L20", "s": 1.2 * 3600},
}
TOKENS = 2048


@dataclass(frozen=True)
class Model:
    """Sizes of a Llama with as many heads for keys as for queries."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    texts: int
    text_tokens: int

    @property
    def shapes(self) -> dict[tuple[int, int], int]:
        """The number of linear layers [out, in] of each shape in a block."""
        h, i = self.hidden, self.intermediate
        return {(h, h): 4, (i, h): 2, (h, i): 1}


MODELS = {
    "llama-2-7b": Model(4096, 11008, 32, heads=32, texts=128, text_tokens=2048),
    "tiny": Model(64, 128, 2, heads=4, texts=2, text_tokens=16),
}
WARM_UP = (256, 256)


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Time the methods on layers of a 7B model.")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--shapes", choices=MODELS, default="llama-2-7b")
    parser.add_argument("--only", help="labels of contenders, with semicolons between")
    parser.add_argument("--texts", type=int, help="of calibration, if not as many as the model says")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--limit-s", type=float, default=float("inf"), help="start no other layer after this")
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    given = parser().parse_args(argv)
    model, end = MODELS[given.shapes], time.monotonic() + given.limit_s
    model = replace(model, texts=given.texts or model.texts)
    record: dict[str, Any] = {
        "command": rehearsing.command(MODULE, argv),
        "device": models.device_name(given.device),
        "shapes": given.shapes,
        "papers": PAPERS,
        "calibration": _calibration(model, given.device),
        "rows": [],
    }
    rehearsing.write_result(given.out, record)
    for label in contenders.chosen(given.only, [*contenders.OURS]):
        record["rows"].append(_row(label, model, given.device, end, record["calibration"]))
        rehearsing.write_result(given.out, record)
        print(json.dumps(record["rows"][-1]), flush=True)


def _row(
    label: str, model: Model, device: str, end: float, calibration: Mapping[str, float]
) -> dict[str, Any]:
    method = contenders.method(label)
    layers: list[dict[str, Any]] = []
    _step(method.step, WARM_UP if model.hidden > 256 else (64, 64), device)
    for shape, count in model.shapes.items():
        if time.monotonic() > end:
            return {"method": label, "layers": layers, "layers_s": None, "model_s": None}
        layers.append({"shape": list(shape), "in_block": count, **_step(method.step, shape, device)})
    layers_s = model.layers * sum(layer["in_block"] * layer["s"] for layer in layers)
    return {
        "method": label,
        "layers": layers,
        "layers_s": layers_s,
        "model_s": layers_s + (calibration["model_s"] if method.calibrated else 0.0),
        "peak_bytes": max((layer["peak_bytes"] or 0 for layer in layers), default=0),
    }


def _step(step: Callable[[Problem], Any], shape: tuple[int, int], device: str) -> dict[str, Any]:
    """Seconds, and the most memory allocated meanwhile, the layer's own base, fine-tune and Gram included."""
    problem = problem_of(shape, device)
    _begin(device)
    began = time.perf_counter()
    compressed = step(problem)
    _synchronize(device)
    seconds = time.perf_counter() - began
    peak = torch.cuda.max_memory_allocated() if device == "cuda" else None
    return {"s": seconds, "peak_bytes": peak, "size_bytes": compressed.size_bytes}


def problem_of(shape: tuple[int, int], device: str) -> Problem:
    """A random layer [out, in]: singular values of its delta fall off, inputs' channels go together."""
    draw = torch.Generator(device).manual_seed(sum(shape))
    out, into = shape

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=draw, device=device)

    rank = min(64, into)
    base = 0.02 * normal(out, into)
    falling = 1 / torch.arange(1, rank + 1, device=device)
    delta = 5e-4 * normal(out, into) + 2e-3 * (normal(out, rank) * falling) @ normal(rank, into)
    sizes = (0.5 * normal(into)).exp()
    inputs = (normal(TOKENS, into) + normal(TOKENS, rank) @ normal(rank, into) / rank**0.5) * sizes
    return Problem(f"random.{out}x{into}", base, base + delta, Inputs(inputs.T @ inputs / TOKENS, TOKENS))


def _begin(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def _synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


class _RandomLlama:
    """The files that calibration reads of a fine-tune: a folder with a configuration, and random tensors."""

    def __init__(self, folder: Path, model: Model) -> None:
        from transformers import LlamaConfig, LlamaForCausalLM

        config = LlamaConfig(
            vocab_size=512,
            hidden_size=model.hidden,
            intermediate_size=model.intermediate,
            num_hidden_layers=2,
            num_attention_heads=model.heads,
            num_key_value_heads=model.heads,
            architectures=["LlamaForCausalLM"],
        )
        config.save_pretrained(folder)
        self.folder = folder
        with torch.device("meta"):
            self._shapes = {name: t.shape for name, t in LlamaForCausalLM(config).state_dict().items()}
        self.block = {name: shape for name, shape in self._shapes.items() if ".layers.0." in name}

    def tensor(self, name: str) -> torch.Tensor:
        shape = self._shapes[name]
        return torch.ones(shape) if len(shape) == 1 else 0.02 * torch.randn(shape)


def _calibration(model: Model, device: str) -> dict[str, float]:
    """Seconds of one block's part in calibration: its layers' Gram matrices, and its run in between."""
    from workers.compression.calibration.blocks import open_blocks
    from workers.compression.calibration.texts import Texts

    with tempfile.TemporaryDirectory() as name:
        tuned = _RandomLlama(Path(name), model)
        rows = tuple(torch.randint(512, (model.text_tokens,)) for _ in range(model.texts))
        dtype = torch.bfloat16 if device == "cuda" else torch.float32
        blocks = open_blocks(tuned, Texts(rows, "random tokens"), device, dtype)
        prefix = next(iter(tuned.block)).partition(".layers.0.")[0] + ".layers.0."
        weights = {name.removeprefix(prefix): tuned.tensor(name) for name in tuned.block}
        _begin(device)
        began = time.perf_counter()
        blocks.enter(0, weights)
        for group in blocks.groups:
            blocks.inputs(group)
        blocks.leave()
        _synchronize(device)
        seconds = time.perf_counter() - began
    peak = torch.cuda.max_memory_allocated() if device == "cuda" else 0
    tokens = model.texts * model.text_tokens
    return {"block_s": seconds, "model_s": seconds * model.layers, "tokens": tokens, "peak_bytes": peak}


def rehearse(folder: Path) -> None:
    """Every method on layers of a tiny model."""
    out = folder / "speed.json"
    main(["--out", str(out), "--shapes", "tiny", "--device", "cpu", "--texts", "1"])
    record = rehearsing.check(out, "rows", "calibration")
    assert [row["method"] for row in record["rows"]] == [*contenders.OURS]
    assert all(row["model_s"] > 0 for row in record["rows"])


if __name__ == "__main__":
    rehearsing.run(main, rehearse)
