"""From prompts and pairs to token ids, as an engine makes them, in batches of similar length."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from profiler.evaluation.scoring import first_scored
from profiler.evaluation.types import Form, Pair
from workers.limited import limited

WHAT = "the tokenizer, or its chat template,"


@dataclass(frozen=True)
class EncodedPair:
    """`ids` of the whole text; those from `start` on are scored, each given the ids before it."""

    ids: list[int]
    start: int

    @property
    def scored(self) -> int:
        return max(len(self.ids) - self.start, 0)


class Encoder:
    """A checkpoint's tokenizer, with its special tokens and its chat template."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def prompts(self, texts: Sequence[str], form: Form) -> list[list[int]]:
        """The token ids of the prompts to answer."""
        with limited(WHAT):
            if form is Form.RAW:
                return self._ids(texts, True)
            return self._ids([self._chat(text) for text in texts], False)

    def pairs(self, pairs: Sequence[Pair]) -> list[EncodedPair]:
        raw = [pair for pair in pairs if pair.form is Form.RAW]
        chats = [pair for pair in pairs if pair.form is Form.CHAT]
        with limited(WHAT):
            encoded = dict(zip(raw, self._raw_pairs(raw), strict=True))
            encoded |= dict(zip(chats, self._chat_pairs(chats), strict=True))
        return [encoded[pair] for pair in pairs]

    def _raw_pairs(self, pairs: Sequence[Pair]) -> list[EncodedPair]:
        wholes = self._ids([pair.context + pair.continuation for pair in pairs], True)
        contexts = self._ids([pair.context for pair in pairs], True)
        return [
            EncodedPair(whole, first_scored(whole, before))
            for whole, before in zip(wholes, contexts, strict=True)
        ]

    def _chat_pairs(self, pairs: Sequence[Pair]) -> list[EncodedPair]:
        wholes = self._ids([self._chat(pair.context, pair.continuation) for pair in pairs], False)
        contexts = self._ids([self._chat(pair.context) for pair in pairs], False)
        return [
            EncodedPair(whole, first_scored(whole, before))
            for whole, before in zip(wholes, contexts, strict=True)
        ]

    def _ids(self, texts: Sequence[str], special: bool) -> list[list[int]]:
        if not texts:
            return []
        ids: list[list[int]] = self._tokenizer(list(texts), add_special_tokens=special)["input_ids"]
        return ids

    def _chat(self, prompt: str, answer: str | None = None) -> str:
        """The template's text up to the start of the answer, or to the answer's end if there is one."""
        messages = [{"role": "user", "content": prompt}]
        if answer is not None:
            messages.append({"role": "assistant", "content": answer})
        text: str = self._tokenizer.apply_chat_template(
            messages,
            tokenize=False,
            add_generation_prompt=answer is None,
            continue_final_message=answer is not None,
        )
        return text

    def decode(self, ids: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return text


def _split(whole: list[int], context: list[int]) -> EncodedPair:
    return EncodedPair(whole, first_scored(whole, context))


def batches(lengths: Sequence[int], max_tokens: int) -> Iterator[list[int]]:
    """Indexes in batches of at most `max_tokens`, padding included; the longest come first.

    A single text that is longer gets its own batch.
    """
    batch: list[int] = []
    longest = 0
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if batch and (len(batch) + 1) * longest > max_tokens:
            yield batch
            batch = []
        if not batch:
            longest = lengths[index]
        batch.append(index)
    if batch:
        yield batch


def padded(
    rows: Sequence[Sequence[int]], filler: int, device: torch.device, *, left: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """(ids, mask), int64 [rows, longest]; the mask is 0 at fillers."""
    longest = max(map(len, rows))
    ids = torch.full((len(rows), longest), filler, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for i, row in enumerate(rows):
        at = slice(longest - len(row), longest) if left else slice(0, len(row))
        ids[i, at] = torch.tensor(row, dtype=torch.int64)
        mask[i, at] = 1
    return ids.to(device), mask.to(device)
