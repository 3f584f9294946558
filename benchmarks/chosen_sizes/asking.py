"""The requests to the control plane: a model of a known shape, and its deployment."""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

from benchmarks import gpu_engine
from benchmarks.profiling import shapes
from controlplane.management.schemas.deploy import DeployModelRequest

TOKENIZER = ("tokenizer*", "vocab.json", "merges.txt", "special_tokens_map.json")


def write_model(folder: Path, shape: str, tokenizer: Path) -> Path:
    """Config and tokenizer; the engine makes the weights. For a Llama also the headers of its tensors, which
    a variant is checked against."""
    if shapes.SHAPES[shape]["model_type"] == "llama":
        gpu_engine.write_dummy_base(folder, shapes.SHAPES[shape])
    folder.mkdir(parents=True, exist_ok=True)
    for path in (path for pattern in TOKENIZER for path in tokenizer.glob(pattern)):
        shutil.copy(path, folder)
    (folder / "config.json").write_text(json.dumps(shapes.SHAPES[shape]))
    return folder


def request_of(name: str, given: argparse.Namespace) -> DeployModelRequest:
    return DeployModelRequest.model_validate({"model": name, **json.loads(given.ask)})
