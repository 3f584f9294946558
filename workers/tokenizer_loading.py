"""A model's tokenizer, with the ids of its file, whatever class the config and the model's type name.

transformers 5 rebuilds the rules of some classes. The byte-level tokenizer.json of DeepSeek-R1-Distill-Llama
is labelled LlamaTokenizerFast, which loses every space. So the ids of fixed texts are compared with a
reference. It is the `tokenizers` library for tokenizer.json itself, or `sentencepiece` for a tokenizer.model
that is alone (the types mistral and mixtral get different ids). If they differ, another class that keeps the
ids is used.
"""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from profiler.errors import CheckpointError
from profiler.files import is_file, read_json

log = logging.getLogger(__name__)

FILE = "tokenizer.json"
CONFIG = "tokenizer_config.json"
SENTENCEPIECE = "tokenizer.model"
MISTRAL = "tekken.json"
# The other files of a tokenizer.
OTHERS = ("special_tokens_map.json", "added_tokens.json", "chat_template.jinja", "chat_template.json")
AS_IT_IS = "PreTrainedTokenizerFast"  # the class that uses tokenizer.json unchanged
# Spaces, lines, digits, code, contractions, scripts, combined characters: rules treat these in different
# ways.
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
    return _load(folder).tokenizer


def is_corrected(folder: Path) -> bool:
    """Whether the tokenizer in `folder` is served with its file's ids instead of its config's and type's.

    Raises CheckpointError like `load_tokenizer`.
    """
    return _load(folder).is_corrected


def served_folder(folder: Path, scratch: Path) -> Path:
    """The tokenizer folder for an engine, such that it has the ids of the file in `folder`.

    That is `folder` itself, or the new folder `scratch`. Raises CheckpointError like `load_tokenizer`. If
    Mistral's own file exists, vLLM reads it with Mistral's library.
    """
    if is_file(folder / MISTRAL) or not is_corrected(folder):
        return folder
    return _without_a_type(folder, scratch)


def difference(tokenizer: Any, folder: Path) -> str | None:
    """The first text for which `tokenizer` makes other ids than the file in `folder`, or decodes ids to
    another text.

    Returns None if no text differs.
    """
    if is_file(folder / FILE):
        return _difference(tokenizer, folder / FILE)
    if is_file(folder / SENTENCEPIECE):
        return _difference_to_pieces(tokenizer, folder / SENTENCEPIECE)
    return None


def _difference(tokenizer: Any, file: Path) -> str | None:
    from tokenizers import Tokenizer

    truth = Tokenizer.from_file(str(file))
    truth.no_truncation()
    truth.no_padding()
    for text in TEXTS:
        ids = truth.encode(text, add_special_tokens=False).ids
        if list(tokenizer.encode(text, add_special_tokens=False)) != ids:
            return text
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is not None and _text(backend, ids) != _text(truth, ids):
            return text
    added = truth.get_added_tokens_decoder().items()
    return next((t.content for i, t in added if tokenizer.convert_tokens_to_ids(t.content) != i), None)


def _text(backend: Any, ids: list[int]) -> str:
    """The text with special tokens: the config may make further tokens special."""
    return str(backend.decode(ids, skip_special_tokens=False))


def _difference_to_pieces(tokenizer: Any, file: Path) -> str | None:
    """The first difference to a SentencePiece model.

    Versions of transformers treat several spaces, also at the start, differently: these are not compared.
    """
    from sentencepiece import SentencePieceProcessor

    truth = SentencePieceProcessor(model_file=str(file))
    plain = (" ".join(text.split()) for text in TEXTS)
    return next((t for t in plain if tokenizer.encode(t, add_special_tokens=False) != truth.encode(t)), None)


class _Loaded(NamedTuple):
    """A tokenizer, and whether its class differs from the class that transformers chooses."""

    tokenizer: Any
    is_corrected: bool


def _load(folder: Path) -> _Loaded:
    from transformers import AutoTokenizer

    chosen, failure = None, None
    try:
        chosen = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        if difference(chosen, folder) is None:
            return _Loaded(chosen, False)
    except MemoryError:
        raise  # its memory is limited (`workers.limited`)
    except Exception as error:  # neither library raises a narrower error
        failure = error
    try:
        with TemporaryDirectory() as scratch:
            copied = _without_a_type(folder, Path(scratch) / "tokenizer")
            other = AutoTokenizer.from_pretrained(copied, local_files_only=True)
        text = difference(other, folder)
    except Exception as error:
        raise _unreadable(folder, failure or error) from error
    if text is None:
        log.warning(
            "%s: the named tokenizer class changes ids, so Ostinato uses the tokenizer's file unchanged",
            folder,
        )
        return _Loaded(other, True)
    if chosen is None or not is_file(folder / FILE):
        raise CheckpointError(
            f"{folder}: no tokenizer class of transformers gives the ids of {FILE} or {SENTENCEPIECE} for "
            f"{text!r:.60}; load the tokenizer where its ids are right, and save it with "
            f"save_pretrained(folder), which writes {FILE}"
        )
    # Its settings change ids, whatever the class: transformers has always used them.
    log.warning("%s: its settings change the ids that %s gives for %r", folder, FILE, text)
    return _Loaded(chosen, False)


def _without_a_type(folder: Path, target: Path) -> Path:
    """Copy the tokenizer's files to the new folder `target`, where no model type chooses its class."""
    target.mkdir(parents=True)
    for name in (FILE, SENTENCEPIECE, *OTHERS):
        if is_file(folder / name):
            shutil.copyfile(folder / name, target / name)
    settings = read_json(folder / CONFIG) if is_file(folder / CONFIG) else {}
    settings.pop("auto_map", None)
    named = {"tokenizer_class": AS_IT_IS} if is_file(folder / FILE) else {}
    (target / CONFIG).write_text(json.dumps({**settings, **named}))
    return target


def _unreadable(folder: Path, error: Exception) -> CheckpointError:
    return CheckpointError(
        f"the tokenizer in {folder} cannot be loaded: {str(error)[:300]}; copy the tokenizer's files "
        f"({FILE}, {CONFIG}) of the model there"
    )
