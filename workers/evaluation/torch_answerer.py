"""A checkpoint that answers tasks in this process: transformers, in batches, on a GPU if there is one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from profiler.evaluation.types import Distribution, Pair, Scored, Settings
from workers.evaluation.encoding import EncodedPair, Encoder, batches, padded
from workers.model_view import temporary_view
from workers.tokenizer_loading import load_tokenizer

TOP = 20  # an engine's default number of top tokens
_LOGIT_BYTES = {"cuda": 8 << 30, "cpu": 512 << 20}  # of a batch's logits, in the model's type and in float32
_GENERATED_TOKENS = {"cuda": 1 << 16, "cpu": 1 << 12}  # of a batch, prompts and answers


class TorchAnswerer:
    """An `Answerer` (profiler/evaluation/types.py) around a causal model of transformers and its tokenizer.

    `top` is the number of tokens in a distribution. The model keeps its device and its type.
    """

    def __init__(self, model: Any, tokenizer: Any, *, top: int = TOP) -> None:
        self.model = model.eval()
        self.encoder = Encoder(tokenizer)
        self._top = top
        self._device = torch.device(model.device)
        self._vocabulary = int(model.config.get_text_config().vocab_size)
        self._ends = _end_tokens(model, tokenizer)
        self._filler = self._ends[0] if self._ends else 0

    @classmethod
    def open(
        cls, folder: Path, device: str | None = None, dtype: torch.dtype | None = None, *, top: int = TOP
    ) -> TorchAnswerer:
        """The checkpoint in `folder`.

        By default it is on a GPU in its own type, else in float32, which is faster on CPUs. Errors: OSError
        or ValueError (as CheckpointError) for a folder that cannot be read.
        """
        from transformers import AutoModelForCausalLM

        where = device or ("cuda" if torch.cuda.is_available() else "cpu")
        kind = dtype or (torch.float32 if where == "cpu" else "auto")
        with temporary_view(folder) as view:
            model = AutoModelForCausalLM.from_pretrained(view, dtype=kind, local_files_only=True)
        return cls(model.to(where), load_tokenizer(folder), top=top)

    @torch.inference_mode()
    def generate(self, prompts: Sequence[str], settings: Settings) -> list[str]:
        encoded = self.encoder.prompts(prompts, settings.format)
        answers = [""] * len(prompts)
        lengths = [len(ids) + settings.max_tokens for ids in encoded]
        for batch in batches(lengths, _GENERATED_TOKENS[self._kind]):
            found = self._generated([encoded[i] for i in batch], settings.max_tokens)
            for index, ids in zip(batch, found, strict=True):
                answers[index] = before_stop(self.encoder.decode(ids), settings.stop)
        return answers

    def score(self, pairs: Sequence[Pair]) -> list[Scored]:
        scores = [Scored(0.0, 0)] * len(pairs)
        for index, ids, logprobs in self.predictions(self.encoder.pairs(pairs)):
            chosen = logprobs.gather(1, ids[:, None]).double().sum()
            scores[index] = Scored(float(chosen), len(ids))
        return scores

    def distributions(self, pairs: Sequence[Pair]) -> list[list[Distribution]]:
        found: list[list[Distribution]] = [[] for _ in pairs]
        for index, ids, logprobs in self.predictions(self.encoder.pairs(pairs)):
            found[index] = _distributions(ids, logprobs, min(self._top, logprobs.shape[1]))
        return found

    @torch.inference_mode()
    def predictions(self, encoded: Sequence[EncodedPair]) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
        """For each pair with scored tokens, in any order: its index, the ids of the scored tokens, and their
        ln p.

        Ids are int64 [n]; ln p of every token at their positions is float32 [n, vocabulary]. A batch has at
        most `token_limit` tokens.
        """
        wanted = [i for i, pair in enumerate(encoded) if pair.scored]
        for batch in batches([len(encoded[i].ids) for i in wanted], self.token_limit):
            rows = [encoded[wanted[i]] for i in batch]
            ids, mask = padded([row.ids for row in rows], self._filler, self._device, left=False)
            logits = self.model(input_ids=ids, attention_mask=mask, use_cache=False).logits
            for i, (at, row) in enumerate(zip(batch, rows, strict=True)):
                start, end = row.start, len(row.ids)
                logprobs = logits[i, start - 1 : end - 1].float().log_softmax(-1)
                yield wanted[at], ids[i, start:end], logprobs

    @property
    def token_limit(self) -> int:
        """The number of tokens whose logits fit in memory at once."""
        return max(_LOGIT_BYTES[self._kind] // (self._vocabulary * 8), 1)

    def _generated(self, prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
        """The greedy continuations, up to the first end token."""
        ids, mask = padded(prompts, self._filler, self._device, left=True)
        out = self.model.generate(
            input_ids=ids,
            attention_mask=mask,
            max_new_tokens=max_tokens,
            do_sample=False,
            num_beams=1,
            repetition_penalty=1.0,
            no_repeat_ngram_size=0,
            eos_token_id=self._ends or None,
            pad_token_id=self._filler,
        )
        return [_until(row, self._ends) for row in out[:, ids.shape[1] :].tolist()]

    @property
    def _kind(self) -> str:
        return "cuda" if self._device.type == "cuda" else "cpu"


def _distributions(ids: torch.Tensor, logprobs: torch.Tensor, top: int) -> list[Distribution]:
    values, tokens = logprobs.topk(top, dim=1)
    own = logprobs.gather(1, ids[:, None])
    rows = zip(
        torch.cat([tokens, ids[:, None]], 1).tolist(), torch.cat([values, own], 1).tolist(), strict=True
    )
    return [Distribution(dict(zip(*row, strict=True))) for row in rows]


def _end_tokens(model: Any, tokenizer: Any) -> list[int]:
    """The tokens that end an answer: from the checkpoint's generation config and its tokenizer."""
    config = getattr(model, "generation_config", None)
    named = [getattr(config, "eos_token_id", None), tokenizer.eos_token_id]
    flat = [token for each in named for token in (each if isinstance(each, list) else [each])]
    return [int(token) for token in dict.fromkeys(flat) if token is not None]


def _until(ids: list[int], ends: Sequence[int]) -> list[int]:
    at = next((i for i, token in enumerate(ids) if token in ends), len(ids))
    return ids[:at]


def before_stop(text: str, stop: Sequence[str]) -> str:
    """The text before the first of the stop strings."""
    found = [at for at in (text.find(each) for each in stop) if at >= 0]
    return text[: min(found)] if found else text
