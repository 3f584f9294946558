"""The tokens of a tokenizer.json, read with the library that engines use. Nothing else is checked."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from profiler.errors import CheckpointError
from profiler.files import is_file
from profiler.inside import open_file

FILE = "tokenizer.json"
MAX_BYTES = 64_000_000  # the largest have about 35 MB
SHOWN = 5  # tokens that a message names


@dataclass(frozen=True)
class TokenizerFile:
    """`tokens` are all tokens by their text, including the `added` tokens."""

    tokens: dict[str, int]
    added: dict[str, int]

    def beyond(self, rows: int) -> dict[str, int]:
        """The tokens that have no row in a vocabulary of `rows`, by their ids."""
        return dict(sorted(((t, i) for t, i in self.tokens.items() if i >= rows), key=lambda item: item[1]))


def read_tokenizer(folder: Path) -> TokenizerFile | None:
    """Read the tokenizer.json in `folder`; None if there is none, or if the library is not installed.

    Raises CheckpointError when it cannot be read.
    """
    where = folder / FILE
    if not is_file(where) or (library := _library()) is None:
        return None
    try:
        with open_file(where) as file:
            raw = file.read(MAX_BYTES + 1) or b""
    except OSError as error:
        raise CheckpointError(f"cannot read {where}: {error.strerror}; check its permissions") from error
    if len(raw) > MAX_BYTES:
        raise CheckpointError(
            f"{where} has more than the allowed {MAX_BYTES} bytes; copy the model's own file there"
        )
    try:
        read = library.Tokenizer.from_buffer(raw)
    except Exception as error:  # the library raises no narrower one
        raise CheckpointError(
            f"{where} is not a valid tokenizer ({str(error)[:200]}); copy the model's original file, or save "
            "the tokenizer with save_pretrained(folder)"
        ) from error
    added = {token.content: number for number, token in read.get_added_tokens_decoder().items()}
    return TokenizerFile(read.get_vocab(with_added_tokens=True), added)


def named(tokens: dict[str, int]) -> str:
    """Some tokens as text: '[PAD]' (64), '<x>' (65) and 3 more."""
    shown = [f"{text!r:.60} ({number})" for text, number in tokens.items()]
    more = f" and {len(shown) - SHOWN} more" if len(shown) > SHOWN else ""
    return ", ".join(shown[:SHOWN]) + more


def _library() -> Any:
    try:
        import tokenizers
    except ImportError:  # a control plane without engines
        return None
    return tokenizers
