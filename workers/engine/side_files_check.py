"""The process that tries a model's tokenizer and chat templates when the model is registered.

It reads one line of JSON (`Asked`), and answers with lines: its next action with the CPU time allowed for it,
and finally its result. The files hold programs: expressions and templates. So the kernel limits the CPU time
and the memory of each part. It kills a process that exceeds its time, and the last line shows at which
action. The process ends with its input.
"""

from __future__ import annotations

import json
import math
import os
import resource
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from profiler.chat_format import named_templates
from profiler.errors import CheckpointError
from profiler.files import is_file
from profiler.inside import confine, open_file
from profiler.variants.side_files import MAX_FILE_BYTES, write_together
from workers.engine import template_child
from workers.limited import data_bytes
from workers.model_view import make_view
from workers.pattern_costs import check_patterns
from workers.tokenizer_loading import FILE, SENTENCEPIECE, is_corrected

MEMORY_BYTES = 4 << 30  # the largest tokenizers take 1 GiB in transformers
LOADING_CPU_S = 300  # a SentencePiece model of 256,000 pieces takes a minute
PATTERNS_CPU_S = 120
TEMPLATE_CPU_S = 5
CHAT = [{"role": "user", "content": "Hello"}]
CORRECTED = f"the tokenizer's class changes token ids, so Ostinato uses the ids of {FILE} itself"
NOT_COMPARED = "the tokenizer is checked when an engine loads it, because transformers is not installed here"


@dataclass(frozen=True)
class Asked:
    """The folder to check: a base's (`base` is ""), or a variant's.

    Files lie below `roots` (none: anywhere); output goes to `scratch`. `compare`: also compare the
    tokenizer's ids with its file's.
    """

    folder: str
    base: str
    scratch: str
    roots: tuple[str, ...] = ()
    compare: bool = True


@dataclass(frozen=True)
class Found:
    """Notes about the model, or the reason for its refusal."""

    told: tuple[str, ...] = ()
    refused: str = ""


def main() -> None:
    asked = json.loads(sys.stdin.readline())
    asked = Asked(**{**asked, "roots": tuple(asked["roots"])})
    threading.Thread(target=_end_with_input, daemon=True).start()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (2 * MAX_FILE_BYTES, 2 * MAX_FILE_BYTES))
    confine(map(Path, (*asked.roots, *filter(None, (asked.base, asked.scratch)))) if asked.roots else ())
    try:
        found = Found(tuple(_tried(asked)))
    except CheckpointError as error:
        found = Found(refused=str(error))
    except MemoryError:
        found = Found(
            refused=f"the tokenizer or chat template in {asked.folder} takes too much memory; copy the "
            "original files"
        )
    _say(asdict(found))


def _end_with_input() -> None:
    sys.stdin.read()
    os._exit(0)


def _say(line: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


def _tried(asked: Asked) -> Iterator[str]:
    """The notes about the model. Raises CheckpointError."""
    folder, base = Path(asked.folder), Path(asked.base)
    made = Path(asked.scratch) / "files"
    if asked.base:
        write_together(base, folder, made)
    else:
        made = make_view(folder, Path(asked.scratch), weights=False)
    _try_patterns(folder)
    if asked.compare and any(is_file(folder / name) for name in (FILE, SENTENCEPIECE)):
        yield from _compared(folder, made)
    for name, text in named_templates(folder).items():
        _try_template(folder, name, text)


def _try_patterns(folder: Path) -> None:
    if not is_file(folder / FILE):
        return
    with _limits(f"the regular expressions in {folder / FILE}", PATTERNS_CPU_S, MEMORY_BYTES):
        with open_file(folder / FILE) as file:
            raw = file.read(MAX_FILE_BYTES) or b""
        try:
            document = json.loads(raw) if b'"Regex"' in raw else {}
        except (ValueError, RecursionError) as error:
            raise CheckpointError(f"{folder / FILE} is not valid JSON ({error}); copy it again") from error
        check_patterns(document)


def _compared(folder: Path, made: Path) -> Iterator[str]:
    if find_spec("transformers") is None:
        yield NOT_COMPARED
        return
    # Importing torch takes four times as long as everything else.
    sys.modules["torch"] = None  # type: ignore[assignment]
    with _limits(f"the tokenizer in {folder}", LOADING_CPU_S, MEMORY_BYTES):
        if is_corrected(made):
            yield CORRECTED


def _try_template(folder: Path, name: str, text: str) -> None:
    what = f"the chat template '{name}' in {folder}"
    with _limits(what, TEMPLATE_CPU_S, template_child.MEMORY_BYTES):
        try:
            template_child.check(text)
        except Exception as error:  # all errors of a template's own code
            raise CheckpointError(
                f"{what} cannot be used: {str(error)[:500]}; copy the model's original template, or delete "
                "the template"
            ) from error
        try:
            template_child.render(text, {"messages": CHAT, "add_generation_prompt": True})
        except MemoryError as error:
            raise CheckpointError(
                f"{what} takes more than {template_child.MEMORY_BYTES >> 20} MiB of memory for a chat of one"
                " message; correct the template, or delete it"
            ) from error
        except Exception:  # a template may refuse this chat
            return


@contextmanager
def _limits(what: str, cpu_s: float, memory_bytes: int) -> Iterator[None]:
    """Limit this process: the kernel kills it when its time is used up; too much memory raises
    MemoryError.
    """
    _say({"doing": what, "cpu_s": cpu_s})
    used = resource.getrusage(resource.RUSAGE_SELF)
    _soft(resource.RLIMIT_CPU, math.ceil(used.ru_utime + used.ru_stime + cpu_s))
    _soft(resource.RLIMIT_DATA, data_bytes() + memory_bytes)
    try:
        yield
    finally:
        _soft(resource.RLIMIT_DATA, resource.RLIM_INFINITY)


def _soft(kind: int, value: int) -> None:
    hard = resource.getrlimit(kind)[1]
    bounds = [bound for bound in (value, hard) if bound != resource.RLIM_INFINITY]
    resource.setrlimit(kind, (min(bounds, default=resource.RLIM_INFINITY), hard))


if __name__ == "__main__":
    main()
