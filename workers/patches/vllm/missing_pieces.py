"""A text for ids without a piece in a SentencePiece vocabulary, as in `prompt_logprobs` of padded rows.

Phi-3's tokenizer has 32,011 pieces and its model 32,064 rows. vLLM's function fails for such an id.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from profiler.patches.target import Target

RESTORE = Target(
    "vllm.tokenizers.detokenizer_utils",
    "_restore_leading_spaces",
    ("raw_token", "token_str", "marker"),
    read={"0.26": "2ad1ba5d3574", "0.32": "2ad1ba5d3574"},
)


def install() -> None:
    """Give such ids their decoded text in this process."""
    RESTORE.replace_once(_restoring)


def _restoring(restore: Callable[[str, str, str], Any]) -> Callable[[str | None, str, str], str]:
    def restored(raw_token: str | None, token_str: str, marker: str) -> str:
        return str(restore(raw_token, token_str, marker)) if raw_token is not None else token_str

    return restored
