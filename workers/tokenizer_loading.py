"""A model's tokenizer, with the ids that its tokenizer.json gives, whatever class the config names.

transformers 5 builds some classes' rules anew: the byte-level tokenizer.json of DeepSeek-R1-Distill-Llama is
labelled LlamaTokenizerFast, which loses every space. So the ids of fixed texts are compared with those of the
`tokenizers` library for tokenizer.json itself. Where they differ, the class serves that takes it as it is.
"""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Any

from profiler.errors import CheckpointError
from profiler.files import is_file, read_json

log = logging.getLogger(__name__)

FILE = "tokenizer.json"
CONFIG = "tokenizer_config.json"
MISTRAL = "tekken.json"
# Beside these, what a tokenizer is made of. Without config.json no model type decides of the class.
OTHERS = ("special_tokens_map.json", "added_tokens.json", "chat_template.jinja", "chat_template.json")
AS_IT_IS = "PreTrainedTokenizerFast"  # the class that takes tokenizer.json as it is
# Spaces, lines, digits, code, contractions, scripts, combined characters: what rules treat in different ways.
TEXTS = (
    "The quick brown fox jumps over the lazy dog.",
    " A leading space,  two spaces,   three, and one at the end ",
    "Lines\nand\n\nempty lines\r\n\ttabs\t\tand spaces  \n   before text",
    "def f(x: int) -> int:\n    return x**2 + 3 * x - 1  # comment\n",
    "I'm, you're, she'll, WE'VE, it's DON'T",
    "0 1 12 123 1234 12345 3.14159 1,000,000 2026-11-29 +1-555-0100",
    "naïve café Ångström Straße e\u0301 \ufb01 ½ ² №",
    "你好\uff0c世界。こんにちは 안녕하세요 Привет мир مرحبا שלום नमस्ते สวัสดี",
    "👍 👩‍👩‍👧 🇩🇪 → ≠ ∑ “quotes” — dashes… \u00a0nbsp\u200bzero",
    'https://example.org/a_b?c=d&e=%20#f user@example.org C:\\path {"k": [1, null]} <tag/> $x_1^2$',
)


def load_tokenizer(folder: Path) -> Any:
    """transformers' tokenizer of the model in `folder`. Raises CheckpointError."""
    return _load(folder)[0]


def served_folder(folder: Path, scratch: Path) -> Path:
    """The folder that an engine is given for the tokenizer in `folder`, for tokenizer.json's ids.

    That is `folder` itself, or the new folder `scratch`. Raises CheckpointError as `load_tokenizer`. Where
    there is Mistral's own file, vLLM reads that with Mistral's library.
    """
    if is_file(folder / MISTRAL) or not is_file(folder / FILE) or not _load(folder)[1]:
        return folder
    scratch.mkdir(parents=True)
    for name in (FILE, *OTHERS):
        if is_file(folder / name):
            shutil.copyfile(folder / name, scratch / name)
    settings = read_json(folder / CONFIG) if is_file(folder / CONFIG) else {}
    settings.pop("auto_map", None)
    (scratch / CONFIG).write_text(json.dumps({**settings, "tokenizer_class": AS_IT_IS}))
    if _load(scratch)[1]:
        raise CheckpointError(f"no class of transformers takes {folder / FILE} as it is; report this file")
    return scratch


def difference(tokenizer: Any, file: Path) -> str | None:
    """The first text of which `tokenizer` makes other ids than the tokenizer.json `file`, or from whose ids
    another text; None where there is none."""
    from tokenizers import Tokenizer

    truth = Tokenizer.from_file(str(file))
    truth.no_truncation()
    truth.no_padding()
    for text in TEXTS:
        ids = truth.encode(text, add_special_tokens=False).ids
        if list(tokenizer.encode(text, add_special_tokens=False)) != ids:
            return text
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is not None and backend.decode(ids) != truth.decode(ids):
            return text
    added = truth.get_added_tokens_decoder().items()
    return next((t.content for i, t in added if tokenizer.convert_tokens_to_ids(t.content) != i), None)


def _load(folder: Path) -> tuple[Any, bool]:
    """The tokenizer, and whether it is of another class than the one that transformers chooses."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    chosen, failure = None, None
    try:
        chosen = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        if not is_file(folder / FILE) or difference(chosen, folder / FILE) is None:
            return chosen, False
    except Exception as error:  # neither library raises a narrower one
        failure = error
    try:
        as_it_is = PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True)
        text = difference(as_it_is, folder / FILE)
    except Exception as error:
        raise _unreadable(folder, failure or error) from error
    if text is not None:
        raise CheckpointError(
            f"{folder}: the tokenizer's settings change what {FILE} makes of {text!r:.60}: expected the ids"
            f" that {FILE} gives; save the tokenizer again with save_pretrained(folder)"
        )
    log.warning("%s: the class that it names changes the ids of %s, which is taken as it is", folder, FILE)
    return as_it_is, True


def _unreadable(folder: Path, error: Exception) -> CheckpointError:
    return CheckpointError(
        f"expected a tokenizer in {folder}, got: {str(error)[:300]}; copy the tokenizer's files "
        f"({FILE}, {CONFIG}) of the model there"
    )
