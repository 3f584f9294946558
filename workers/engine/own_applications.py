"""Variants with their own text files answer with them: chat template, tokenizer, end tokens, generation
defaults.

vLLM has one tokenizer, template and generation config for a base and its LoRAs. So each set of such files
gets another copy of vLLM's OpenAI application, with its own renderer and input processor, around the same
engine. Variants with equal files share one; variants without files, or with their base's, use the base's.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import json
import shutil
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from profiler.errors import CheckpointError
from profiler.files import is_file, read_json
from profiler.inside import here
from profiler.variants.side_files import (
    GENERATION,
    chat_template,
    generation_file,
    side_files,
    write_together,
)
from workers.engine.template_process import TemplateFailed, Templates
from workers.patches.vllm.engine_copy import engine_copy
from workers.tokenizer_loading import FILE, load_tokenizer

MOST = 16  # cached applications; those of more variants are made again on demand


@dataclass(frozen=True)
class Words:
    """A variant's own files, in `folder`: its tokenizer, a file with its template, generation defaults."""

    folder: Path
    tokenizer: bool
    template: Path | None
    generation: bool

    @property
    def any(self) -> bool:
        return self.tokenizer or self.template is not None or self.generation


class OwnApplications:
    """The applications, by the digest of their files.

    `make` makes vLLM's application for an engine client and a template's file, if there is one; `app` is the
    base's.

    Files are copied to `scratch` and read there; variants' files must lie below `roots` (none: anywhere).
    """

    def __init__(
        self,
        app: Any,
        llm: Any,
        base: Path,
        scratch: Path,
        roots: Sequence[Path],
        make: Callable[[Any, Path | None], Awaitable[Any]],
        templates: Templates,
    ) -> None:
        self.app = app
        self._llm, self._base, self._scratch = llm, base, scratch
        self._roots, self._make = here(roots), make
        self._templates = templates
        self._of: dict[int, str] = {}
        self._words: dict[str, Words] = {}
        self._kept: OrderedDict[str, Any] = OrderedDict()
        self._numbers = itertools.count()
        self._lock = asyncio.Lock()

    async def load(self, uid: int, folder: Path) -> None:
        """Read the variant's own files. Raises CheckpointError."""
        if not await asyncio.to_thread(self._has_words, folder):
            return
        async with self._lock:
            digest, words = await asyncio.to_thread(self._read, uid, folder)
            if not words.any:
                await asyncio.to_thread(shutil.rmtree, words.folder)
                return
            self._of[uid], self._words[digest] = digest, words
        try:
            await self.application(uid)
        except BaseException:
            self.forget(uid)
            raise

    async def application(self, uid: int) -> Any:
        """The application that answers this variant."""
        digest = self._of.get(uid)
        if digest is None:
            return self.app
        if digest in self._kept:
            self._kept.move_to_end(digest)
            return self._kept[digest]
        async with self._lock:
            if digest not in self._kept and digest in self._words:
                self._kept[digest] = await self._made(self._words[digest])
                if len(self._kept) > MOST:
                    self._kept.popitem(last=False)
            return self._kept.get(digest, self.app)

    def forget(self, uid: int) -> None:
        """Forget the variant, and its files if no other variant has them; requests under way keep their
        application.
        """
        digest = self._of.pop(uid, None)
        if digest is None or digest in self._of.values():
            return
        self._kept.pop(digest, None)
        words = self._words.pop(digest)
        shutil.rmtree(words.folder, ignore_errors=True)

    def close(self) -> None:
        self._templates.close()

    def _has_words(self, folder: Path) -> bool:
        return bool(side_files(folder)) or generation_file(folder, self._base, self._roots) is not None

    def _read(self, uid: int, folder: Path) -> tuple[str, Words]:
        """The variant's own files and their digest."""
        made = self._scratch / f"{uid}-{next(self._numbers)}"
        write_together(self._base, folder, made, self._roots)
        digest = _digest(made)
        if digest in self._words:
            shutil.rmtree(made)
            return digest, self._words[digest]
        tokenizer = is_file(made / FILE) and _identity(load_tokenizer(made)) != self._of_the_base
        generation = _json(made / GENERATION) != _json(self._base / GENERATION)
        return digest, Words(made, tokenizer, self._own_template(made), generation)

    @cached_property
    def _of_the_base(self) -> str:
        """The identity of the base's tokenizer, loaded like those of variants: without the model's type."""
        alone = self._scratch / "base"
        write_together(self._base, alone, alone)
        return _identity(load_tokenizer(alone)) if is_file(alone / FILE) else ""

    def _own_template(self, made: Path) -> Path | None:
        text, file = chat_template(made)
        if text is None or text == chat_template(self._base).text:
            return None
        try:
            self._templates.check(text)
        except TemplateFailed as error:
            raise CheckpointError(f"the variant's chat template in {file} cannot be used: {error}") from error
        where = made / "own-template.jinja"
        where.write_text(text, encoding="utf-8")
        return where

    async def _made(self, words: Words) -> Any:
        tokenizer = self._llm.renderer.tokenizer
        if words.tokenizer:
            side = getattr(tokenizer, "truncation_side", "left")
            tokenizer = await asyncio.to_thread(_own_tokenizer, words.folder, side)
        generation = words.folder if words.generation else None
        return await self._make(engine_copy(self._llm, tokenizer, generation), words.template)


def _digest(folder: Path) -> str:
    digest = hashlib.sha256()
    for name in side_files(folder):
        digest.update(f"{name} {hashlib.sha256((folder / name).read_bytes()).hexdigest()} ".encode())
    return digest.hexdigest()


def _own_tokenizer(folder: Path, truncation_side: str) -> Any:
    """The tokenizer in `folder`, prepared as vLLM does it."""
    from vllm.tokenizers.hf import get_cached_tokenizer

    tokenizer = load_tokenizer(folder)
    tokenizer.truncation_side = truncation_side
    return get_cached_tokenizer(tokenizer)


def _identity(tokenizer: Any) -> str:
    """A digest that is equal for equal rules and special tokens."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    rules = json.loads(backend.to_str()) if backend is not None else {}
    kept = {name: rule for name, rule in rules.items() if name not in ("truncation", "padding")}
    special = [getattr(tokenizer, f"{name}_token") for name in ("eos", "bos", "pad")]
    return hashlib.sha256(json.dumps([kept, special], sort_keys=True).encode()).hexdigest()


def _json(where: Path) -> dict[str, Any]:
    return read_json(where) if is_file(where) else {}
