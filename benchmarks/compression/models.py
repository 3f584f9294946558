"""Language models in transformers: examples as tokens, greedy answers, and how far two models differ."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.compression.tasks import Example

SLACK_TOKENS = 16
BETWEEN = "\n\n"
ANSWERED = 512  # prompts in a batch; fewer of long ones
WEIGHTS = "model.safetensors"


@dataclass(frozen=True)
class Tokens:
    """An example as token ids: of the prompt, then of the answer, which an end-of-text token closes."""

    prompt: list[int]
    answer: list[int]

    def __len__(self) -> int:
        return len(self.prompt) + len(self.answer)


def load(folder: Path, device: str) -> tuple[Any, Any]:
    """The model in bfloat16 on `device`, and its tokenizer."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, attn_implementation="sdpa")
    return model.to(device).eval(), AutoTokenizer.from_pretrained(folder)


def save(model: Any, base: Path, target: Path) -> None:
    """As a folder like `base`: its tensors in bfloat16 by the same names, its tokenizer and configuration."""
    from safetensors import safe_open
    from safetensors.torch import save_file

    target.mkdir(parents=True)
    for path in base.iterdir():
        if path.suffix != ".safetensors" and path.is_file():
            shutil.copyfile(path, target / path.name)
    with safe_open(base / WEIGHTS, "pt") as file:
        names = list(file.keys())
    held = model.state_dict()
    tensors = {name: held[name].to("cpu", torch.bfloat16).contiguous() for name in names}
    save_file(tensors, target / WEIGHTS, metadata={"format": "pt"})


def tokenized(tokenizer: Any, examples: Sequence[Example]) -> list[Tokens]:
    prompts = tokenizer([example.prompt for example in examples])["input_ids"]
    answers = tokenizer([example.answer for example in examples], add_special_tokens=False)["input_ids"]
    end = [tokenizer.eos_token_id]
    return [Tokens(prompt, answer + end) for prompt, answer in zip(prompts, answers, strict=True)]


@dataclass(frozen=True)
class Batch:
    """Ids int64 [rows, longest]; `answers` [n], all the tokens of answers, and `before` [n], in flattened ids
    the place before each of them. Found on the CPU, so that no step waits for the GPU."""

    ids: torch.Tensor
    before: torch.Tensor
    answers: torch.Tensor


def right_padded(examples: Sequence[Tokens], device: str) -> Batch:
    """Attention is causal, so padding on the right changes nothing before it and needs no mask."""
    longest = max(map(len, examples))
    ids = torch.zeros(len(examples), longest, dtype=torch.long)
    before = []
    for row, tokens in enumerate(examples):
        ids[row, : len(tokens)] = torch.tensor(tokens.prompt + tokens.answer)
        start = row * longest + len(tokens.prompt) - 1
        before.append(torch.arange(start, start + len(tokens.answer)))
    answers = torch.tensor([token for tokens in examples for token in tokens.answer])
    return Batch(*(t.to(device, non_blocking=True) for t in (ids, torch.cat(before), answers)))


def answer_logits(model: Any, batch: Batch) -> torch.Tensor:
    """[n, vocabulary], before each of the n answer tokens.

    The head sees no other positions: with 49,152 tokens it costs as much as several layers.
    """
    hidden = model.model(input_ids=batch.ids, use_cache=False).last_hidden_state
    logits: torch.Tensor = model.lm_head(hidden.flatten(0, 1)[batch.before])
    return logits


@torch.inference_mode()
def accuracy(
    model: Any, tokenizer: Any, examples: Sequence[Example], room: int, shown: Sequence[Example] = ()
) -> float:
    """The share of examples whose greedy answer is exact; an answer may take `room` tokens and a few more.

    `shown` examples stand before each prompt, empty lines between them.
    """
    before = "".join(f"{example.prompt}{example.answer}{BETWEEN}" for example in shown)
    rows, right = ANSWERED // (1 + len(shown)), 0
    for start in range(0, len(examples), rows):
        batch = examples[start : start + rows]
        written = greedy(
            model, tokenizer, [before + example.prompt for example in batch], room + SLACK_TOKENS
        )
        answers = [text.partition(BETWEEN)[0].strip() for text in written]
        right += sum(given == example.answer for given, example in zip(answers, batch, strict=True))
    return right / len(examples)


def greedy(model: Any, tokenizer: Any, prompts: Sequence[str], tokens: int) -> list[str]:
    """The model's text after each prompt."""
    tokenizer.padding_side = "left"
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    given = tokenizer(list(prompts), return_tensors="pt", padding=True).to(model.device)
    written = model.generate(
        input_ids=given["input_ids"],
        attention_mask=given["attention_mask"],
        do_sample=False,
        max_new_tokens=tokens,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    answers = written[:, given["input_ids"].shape[1] :]
    return list(tokenizer.batch_decode(answers, skip_special_tokens=True))


@torch.inference_mode()
def divergence(reference: Any, model: Any, tokens: Sequence[Tokens], rows: int = 32) -> float:
    """Mean over answer tokens of KL(reference || model), in nats, with the true answer before each token."""
    total, count = 0.0, 0
    for start in range(0, len(tokens), rows):
        batch = right_padded(tokens[start : start + rows], reference.device)
        p, q = (answer_logits(m, batch).float().log_softmax(1) for m in (reference, model))
        total += float((p.exp() * (p - q)).sum())
        count += p.shape[0]
    return total / count


def device_name(device: str) -> str:
    return torch.cuda.get_device_name() if device == "cuda" else "CPU"


def write_tiny(folder: Path) -> Path:
    """A model of two small layers with random weights, and a tokenizer of bytes: for rehearsals."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate(("<end>", *alphabet))}
    bytes_only = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    bytes_only.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytes_only.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bytes_only, eos_token="<end>", pad_token="<end>")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=264,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
