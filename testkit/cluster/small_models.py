"""Small models with SmolLM2's tokenizer: their engines start, and are measured, in less time."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from testkit.tiny_families import Tiny

# vLLM's attention on CPU takes heads of 32; the weights are large enough for tokens to differ.
GEMMA3 = Tiny(
    "Gemma3",
    {
        "num_hidden_layers": 3,
        "hidden_size": 64,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "intermediate_size": 128,
        "max_position_embeddings": 4096,
        "sliding_window": 64,
        "sliding_window_pattern": 3,
        "initializer_range": 0.2,
        "tie_word_embeddings": False,
    },
    "Gemma3Text",
)


def first_layers(base: Path, folder: Path, layers: int) -> Path:
    """The model in `base` with fewer layers."""
    _copy_but_weights(base, folder)
    config = json.loads((folder / "config.json").read_text()) | {"num_hidden_layers": layers}
    (folder / "config.json").write_text(json.dumps(config))
    with safe_open(base / "model.safetensors", "pt") as weights:
        kept = {n: weights.get_tensor(n) for n in weights.keys() if _is_within(n, layers)}  # noqa: SIM118
    save_file(kept, folder / "model.safetensors", {"format": "pt"})
    return folder


def _is_within(tensor: str, layers: int) -> bool:
    number = re.search(r"\.layers\.(\d+)\.", tensor)
    return number is None or int(number[1]) < layers


def fewer_tokens(folder: Path, tokens: int) -> Path:
    """The model in `folder` with the first tokens of its vocabulary: special ones, bytes, frequent words.

    A merge makes a token of two earlier ones, so that the others are never needed.
    """
    file = folder / "tokenizer.json"
    told = json.loads(file.read_text())
    words = told["model"]
    words["vocab"] = {token: number for token, number in words["vocab"].items() if number < tokens}
    words["merges"] = [pair for pair in words["merges"] if "".join(pair) in words["vocab"]]
    file.write_text(json.dumps(told))
    config = json.loads((folder / "config.json").read_text())
    weights = load_file(folder / "model.safetensors")
    rows = {n: t[:tokens].clone() for n, t in weights.items() if t.shape[0] == config["vocab_size"]}
    save_file(weights | rows, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": tokens}))
    return folder


def showing_tools(folder: Path) -> Path:
    """The model in `folder` with a chat template that shows it tools, called as Hermes and Qwen call them.

    Without tools the template's output is unchanged.
    """
    template = folder / "chat_template.jinja"
    shown = (
        "{% if tools %}<|im_start|>system\nTools: {{ tools | tojson }}; call them as <tool_call>"
        '{"name": NAME, "arguments": OBJECT}</tool_call><|im_end|>\n{% endif %}'
    )
    said = template.read_text()
    assert "+ message['content'] +" in said
    template.write_text(shown + said.replace("+ message['content'] +", "+ (message['content'] or '') +"))
    return folder


def gemma3(base: Path, folder: Path) -> Path:
    """Random weights of another architecture than `base`, with its tokenizer and no chat template."""
    words = json.loads((base / "config.json").read_text())
    _copy_but_weights(base, folder)
    torch.manual_seed(1)
    ends = {key: words[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id") if key in words}
    tokenizer = (folder / "tokenizer.json").read_text()
    GEMMA3.write(folder, vocab_size=words["vocab_size"], **ends)
    (folder / "tokenizer.json").write_text(tokenizer)
    _without_template(folder)
    return folder


def _without_template(folder: Path) -> None:
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    words = folder / "tokenizer_config.json"
    told = json.loads(words.read_text())
    told.pop("chat_template", None)
    words.write_text(json.dumps(told))


def _copy_but_weights(base: Path, folder: Path) -> None:
    shutil.copytree(base, folder, ignore=shutil.ignore_patterns("*.safetensors"))
