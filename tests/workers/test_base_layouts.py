"""Bases as hubs and trainers lay them out: served as transformers reads them, or refused by what they are.

The tensors of vLLM's own loader for a launch's folder are compared, bit for bit, with the state of
transformers' model of the same folder. `test_layouts_served.py` has an engine serve one of them, and
`group/test_model_of_launch.py` shows which files a launch gives to vLLM.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from profiler.checkpoint import expected_tensors, read_model
from profiler.errors import CheckpointError
from testkit.base_layouts import REFUSED, SERVED, assert_says_what_to_do
from workers.evaluation.torch_answerer import TorchAnswerer
from workers.model_view import make_view


def loaded_by_vllm(view: Path) -> dict[str, torch.Tensor]:
    from vllm.config.load import LoadConfig
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

    loader = DefaultModelLoader(LoadConfig(load_format="auto", use_tqdm_on_load=False))
    source = DefaultModelLoader.Source(str(view), None)
    found: dict[str, torch.Tensor] = {}
    for name, tensor in loader._get_weights_iterator(source):
        assert name not in found, "loaded twice"
        found[name] = tensor
    return found


@pytest.mark.parametrize("name", SERVED)
def test_vllm_is_given_what_transformers_reads(name: str, tmp_path: Path) -> None:
    made = SERVED[name](tmp_path / "model")
    folder, reference = made if isinstance(made, tuple) else (made, made)
    spec = read_model(folder)
    view = make_view(folder, tmp_path / "views")
    loaded, expected = loaded_by_vllm(view), expected_tensors(folder)
    model = AutoModelForCausalLM.from_pretrained(reference, dtype=torch.float32)
    state = model.state_dict()
    for tensor in expected:
        stored = loaded[tensor].float()
        assert torch.equal(stored, one(state, tensor)), tensor
    assert all(rest in loaded for rest in expected)
    ids = torch.tensor([[3, 5, 7, 11, 13, 17, 19, 23]])
    answerer = AutoModelForCausalLM.from_pretrained(view, dtype=torch.float32)  # as TorchAnswerer opens it
    with torch.inference_mode():
        difference = model(ids).logits.log_softmax(-1) - answerer(ids).logits.log_softmax(-1)
    assert difference.abs().max() < 1e-3
    assert spec.fingerprint == read_model(view).fingerprint


def one(state: dict[str, torch.Tensor], name: str) -> torch.Tensor:
    """A tensor by its name in the files; transformers 5 holds all experts of a layer in one."""
    if match := re.fullmatch(r"(.*\.experts)\.(\d+)\.(\w+)_proj\.weight", name):
        expert, kind = int(match[2]), match[3]
        if kind == "down":
            return state[f"{match[1]}.down_proj"][expert]
        both = state[f"{match[1]}.gate_up_proj"][expert]
        return both.chunk(2)[0 if kind == "gate" else 1]
    return state[name]


@pytest.mark.parametrize("name", REFUSED)
def test_unserved_layouts_are_refused_by_their_kind(name: str, tmp_path: Path) -> None:
    build, words = REFUSED[name]
    folder = build(tmp_path / "model")
    with pytest.raises(CheckpointError, match=re.compile(words, re.DOTALL)) as refused:
        read_model(folder)
    assert_says_what_to_do(str(refused.value), folder)


def test_an_evaluation_reads_the_same_files(tmp_path: Path) -> None:
    """If the adapter's config stayed, transformers would look for the adapter's base."""
    folder = SERVED["an old file whose name comes first"](tmp_path / "model")
    assert isinstance(folder, Path)
    with pytest.raises(CheckpointError, match="tokenizer"):  # the stub is none; the model was read by then
        TorchAnswerer.open(folder, "cpu")
