"""Calibration texts: rows of token ids from which the inputs of layers are computed."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

from profiler.architectures.registry import describe
from profiler.errors import CheckpointError
from profiler.files import read_json
from workers.compression.calibration.text_files import Document, read_documents
from workers.compression.recipe import BUNDLED, ROWS, TOKENS
from workers.limited import limited
from workers.tokenizer_loading import load_tokenizer

CHARACTERS_PER_TOKEN = 4
# BUNDLED has prose, questions and answers, code and arithmetic, for users without texts like the model's
# requests. Texts written by the model itself would be closer to these. But generating them needs all of its
# weights in memory, and compression holds one layer at a time.

T = TypeVar("T")


@dataclass(frozen=True)
class Texts:
    """Token ids, row by row: int64 [tokens] each, of different lengths. `warnings` are for the user."""

    rows: tuple[torch.Tensor, ...]
    source: str
    warnings: tuple[str, ...] = ()

    @property
    def tokens(self) -> int:
        return sum(len(row) for row in self.rows)

    @property
    def digest(self) -> str:
        """SHA-256 of the ids and the ends of rows: equal digests mean equal inputs of layers."""
        state = hashlib.sha256()
        for row in self.rows:
            state.update(len(row).to_bytes(8, "little"))
            state.update(row.numpy().astype("<i8").tobytes())
        return state.hexdigest()


def bundled_texts(folder: Path, rows: int = ROWS, tokens: int = TOKENS) -> Texts:
    """The text that is bundled with Ostinato. Raises CheckpointError."""
    return read_texts(BUNDLED, folder, rows, tokens)


def read_texts(path: Path, folder: Path, rows: int = ROWS, tokens: int = TOKENS) -> Texts:
    """At most `rows` rows of at most `tokens` tokens (and the model's positions) from a user's file.

    `folder` is the tuned model's, with config.json and tokenizer. A row is a line of .jsonl, or consecutive
    paragraphs of .txt; longer texts are split into several rows. If there are more rows than requested, rows
    at even distances are taken. Raises CheckpointError with the correction needed.
    """
    if rows < 1 or tokens < 1:
        raise CheckpointError(f"expected at least 1 row of at least 1 token, got {rows} of {tokens}")
    description = describe(read_json(folder / "config.json"), folder / "config.json")
    tokens = min(tokens, description.max_position)
    documents = _evenly(read_documents(path, tokens * CHARACTERS_PER_TOKEN), rows)
    with limited(f"the tokenizer in {folder}, or its chat template,"):
        tokenizer = _tokenizer(folder)
        cut = _cut([_ids(tokenizer, document, folder) for document in documents], rows, tokens)
    cut = _within(cut, path.stat().st_size)
    if not cut:
        raise CheckpointError(f"the tokenizer in {folder} turns {path} into no tokens; give other texts")
    kept = tuple(torch.tensor(row, dtype=torch.int64) for row in _evenly(cut, rows))
    widest = max(linear.into for linear in description.linears.values())
    return Texts(kept, str(path), _warnings(kept, str(path), widest, rows * tokens))


def _warnings(rows: Sequence[torch.Tensor], source: str, widest: int, asked: int) -> tuple[str, ...]:
    tokens = sum(len(row) for row in rows)
    if tokens >= widest:
        return ()
    found = (
        f"{source} gives {tokens} tokens in {len(rows)} rows, fewer than the {widest} inputs of the model's "
        "widest layer, so calibration cannot tell all inputs apart; "
    )
    if asked < widest:
        return (f"{found}raise --rows or --tokens from {asked} to {widest} tokens or more in all",)
    return (f"{found}give a file of at least {widest} tokens, better {asked}",)


def _tokenizer(folder: Path) -> Any:
    tokenizer = load_tokenizer(folder)
    tokenizer.model_max_length = 10**30  # rows are cut here; it need not warn of long texts
    return tokenizer


def _ids(tokenizer: Any, document: Document, folder: Path) -> list[int]:
    if document.messages and not tokenizer.chat_template:
        raise CheckpointError(
            f"{document.where} has messages, but the tokenizer in {folder} has no chat template; give "
            '{"text": "..."} lines, or copy the chat template there'
        )
    try:
        if not document.messages:
            return list(tokenizer(document.text)["input_ids"])
        text = tokenizer.apply_chat_template(list(document.messages), tokenize=False)
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])
    except MemoryError:
        raise  # its memory is limited
    except Exception as error:  # all errors of the tokenizer or of the template's own code
        raise CheckpointError(
            f"{document.where}: the tokenizer in {folder} refuses this text: {str(error)[:300]}; correct the "
            "text"
        ) from error


def _cut(documents: Sequence[list[int]], rows: int, tokens: int) -> list[list[int]]:
    """Rows of at most `tokens` ids: one row of each document if these suffice, else all rows."""
    starts = [ids[:tokens] for ids in documents if ids]
    if len(starts) >= rows:
        return starts
    return [ids[at : at + tokens] for ids in documents for at in range(0, len(ids), tokens)]


def _within(rows: Sequence[list[int]], most: int) -> list[list[int]]:
    """The first rows, with at most `most` tokens in all.

    `most` is the file's number of bytes, for which memory was reserved. Only a chat template makes more
    tokens than that.
    """
    kept, left = [], most
    for row in rows:
        if left > 0:
            kept.append(row[:left])
        left -= len(row)
    return kept


def _evenly(items: Sequence[T], count: int) -> list[T]:
    """At most `count` of the items, at even distances, in their order."""
    if len(items) <= count:
        return list(items)
    return [items[number * len(items) // count] for number in range(count)]
