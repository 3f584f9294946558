"""A model of two layers that copies letters, and its fine-tune, which replaces each letter by the next."""

from __future__ import annotations

import json
import string
from collections.abc import Callable
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

LETTERS = string.ascii_lowercase
VOCABULARY = {token: i for i, token in enumerate([*LETTERS, ">", "\n"])}
PAIRS = [a + b for a in LETTERS for b in LETTERS]


def copied(pair: str) -> str:
    return pair


def moved_on(pair: str) -> str:
    """The next letters: ab becomes bc; a follows z."""
    return "".join(LETTERS[(LETTERS.index(letter) + 1) % 26] for letter in pair)


def write_base(folder: Path, steps: int = 250) -> Path:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(VOCABULARY), hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=32, tie_word_embeddings=True,
        bos_token_id=None, eos_token_id=VOCABULARY["\n"], pad_token_id=None,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    _train(model, copied, steps)
    return _save(model, folder)


def write_finetune(base: Path, folder: Path, steps: int = 120) -> Path:
    torch.manual_seed(1)
    model = LlamaForCausalLM.from_pretrained(base, dtype=torch.float32)
    _train(model, moved_on, steps, rate=1e-3)
    return _save(model, folder)


def write_renamed(tuned: Path, folder: Path) -> Path:
    """The same fine-tune with another tokenizer, which numbers the letters backwards."""
    model = LlamaForCausalLM.from_pretrained(tuned, dtype=torch.float32)
    words = {letter: len(LETTERS) - 1 - LETTERS.index(letter) for letter in LETTERS}
    embedding = model.get_input_embeddings().weight.data
    embedding[: len(LETTERS)] = embedding[: len(LETTERS)].flip(0)
    return _save(model, folder, VOCABULARY | words)


def write_tasks(file: Path, count: int = 150) -> Path:
    """The task that the fine-tune was trained for."""
    lines = [{"task": "next letters", "maxTokens": 3, "stop": ["\n"]}]
    rows = [
        {"prompt": f"{pair}>", "answer": moved_on(pair)} for pair in PAIRS[:: len(PAIRS) // count][:count]
    ]
    file.write_text("\n".join(json.dumps(row) for row in [*lines, *rows]))
    return file


def write_texts(file: Path) -> Path:
    """Texts for calibration."""
    file.write_text("\n\n".join(f"{pair}>{moved_on(pair)}" for pair in PAIRS[::5]))
    return file


def share_right(folder: Path, prompts: list[str], answers: list[str]) -> float:
    """The share of right greedy answers of two tokens, each token from its own pass: no batch, no cache."""
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    right = 0
    for prompt, answer in zip(prompts, answers, strict=True):
        ids = [VOCABULARY[letter] for letter in prompt]
        for _ in range(2):
            with torch.no_grad():
                ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
        right += [VOCABULARY[letter] for letter in answer] == ids[-2:]
    return right / len(prompts)


def _train(model: LlamaForCausalLM, answer: Callable[[str], str], steps: int, rate: float = 3e-3) -> None:
    rows = torch.tensor([[VOCABULARY[c] for c in f"{pair}>{answer(pair)}\n"] for pair in PAIRS])
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.0)
    model.train()
    for _ in range(steps):
        batch = rows[torch.randint(len(rows), (128,))]
        logits = model(batch).logits[:, 2:-1]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 3:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def _save(model: LlamaForCausalLM, folder: Path, vocabulary: dict[str, int] = VOCABULARY) -> Path:
    model.save_pretrained(folder)
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="\n"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="\n").save_pretrained(folder)
    return folder
